"""TernGrad: Wen, Xu, Yan, Wu, Wang, Chen, Li, NeurIPS 2017, arXiv 1705.07878.

Each element g becomes sign(g) · s with probability |g|/s, else 0, where s is the tensor's largest magnitude. Its
expectation is g. Gradients are first clipped at c standard deviations, since s determines the variance (§3, "gradient
clipping"). All workers share the largest s ("scaler sharing"), so that their sum is a multiple of one number. Rounding
is unbiased and needs no error feedback. Clipping is biased; `error_feedback` keeps both errors for the next step.

The authors' published code sets s = c·σ, which also clips (elements above s are always sent as s), and sends floats.
This file follows the paper, and packs five ternary digits in a byte: always 1.6 bits per element, close to log2 3 =
1.585. On real gradients, most of which round to 0, the digits' zeroth-order entropy is 0.9 to 1.05 bits.

It extends `LossyCompressor` and not `TensorCodec` for two reasons. Workers agree on the scalers before they encode. The
owner of a partition adds digits, not numbers: sums of N workers' digits -1, 0, 1 are whole numbers from -N to N. They
return exactly, as digits of base 2N + 1 in log2(2N + 1) bits per element instead of 32 (§3). Nothing is rounded twice,
and the mean equals that of an all-gather. A parameter server (topology="server") sends the sums as fp32.

A worker's draws are a function of (seed, worker, step).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import ClassVar, NamedTuple

import torch

from lightning_gradcomp.compressors.base import DENSE_START, Card, Collectives, LossyCompressor, Partitions
from lightning_gradcomp.compressors.decoded import Chunked, Decoded, Dense
from lightning_gradcomp.compressors.kernels import radix
from lightning_gradcomp.compressors.kernels.bits import look_up, padded
from lightning_gradcomp.compressors.kernels.rng import Uniform
from lightning_gradcomp.compressors.layout import CHUNK, Layout, chunks
from lightning_gradcomp.compressors.payloads import Payloads
from lightning_gradcomp.compressors.updates import Update
from lightning_gradcomp.errors import is_number, is_whole, refusal
from lightning_gradcomp.registry import register

DIGITS = 5
"""Ternary digits in a byte: 3^5 = 243."""


def scaler_of(g: torch.Tensor, c: float) -> torch.Tensor:
    """The scaler s (fp32 [...]) of g (fp32 [..., n]): its largest magnitude, but at most c standard deviations.

    c = 0 means no limit. Deviations are from 0, which the paper takes as the mean. Squares of fp32 values can overflow
    fp32, so g is first divided by its largest magnitude.
    """
    n, largest = g.shape[-1], torch.maximum(g.amax(-1), -g.amin(-1))  # aminmax of rows takes ten times as long
    if c == 0:
        return largest
    unit = largest.clamp(min=torch.finfo(torch.float32).tiny)
    parts = [g[..., start:stop] / unit.unsqueeze(-1) for start, stop in chunks(0, n, g.device)]
    squares = torch.stack([part.square_().sum(-1) for part in parts]).sum(0)
    return torch.minimum(largest, c * (squares / n).sqrt() * unit)


def ternarise(g: torch.Tensor, s: torch.Tensor, uniform: Uniform) -> torch.Tensor:
    """1 + t (uint8), where t is -1, 0 or 1 with expectation g / s, for g (fp32) within ±s; t = 0 if s is 0.

    t = floor(g / s + u), u uniform in (0, 1): the paper's sign(g) · b with P(b = 1) = |g| / s, in one pass.
    """
    per_s = 1 / s.clamp(min=torch.finfo(torch.float32).tiny)
    drawn = uniform.draw(g.numel(), 1.0).view(g.shape).addcmul_(g, per_s)
    return drawn.to(torch.uint8)


def packed_bytes(n: int) -> int:
    """Bytes of n ternary digits."""
    return -(-n // DIGITS)


def pack(digits: torch.Tensor) -> torch.Tensor:
    """Five digits (uint8 [n], each 0, 1 or 2) in a byte, the first lowest: uint8 [ceil(n / 5)]."""
    if spare := -digits.numel() % DIGITS:
        digits = torch.nn.functional.pad(digits, (0, spare))
    *lower, highest = digits.view(-1, DIGITS).unbind(1)
    packed = highest.clone()
    for column in reversed(lower):
        packed.mul_(3).add_(column)
    return packed


@cache
def _digit_table(device: torch.device) -> torch.Tensor:
    """The five digits of every byte that `pack` writes, minus 1: fp32 [243, 5]."""
    powers = 3 ** torch.arange(DIGITS, device=device)
    return (torch.arange(3**DIGITS, device=device).unsqueeze(1) // powers % 3 - 1).float()


def unpack(packed: torch.Tensor, n: int) -> torch.Tensor:
    """The n digits that `pack` wrote, minus 1: fp32 [n]."""
    return look_up(_digit_table(packed.device), packed)[:n]


class Piece(NamedTuple):
    """A unit of drawing and packing: part of a tensor, or several consecutive tensors of one size.

    Args:
        start, stop: where it is in the flat buffer.
        tensors: the tensors' indices in the layout.
    """

    start: int
    stop: int
    tensors: slice

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The piece's elements of `flat`, one row per tensor."""
        return flat[self.start : self.stop].view(self.tensors.stop - self.tensors.start, -1)


def pieces_of(layout: Layout, device: torch.device) -> list[Piece]:
    """The pieces of a flat buffer, in order."""
    pieces: list[Piece] = []
    for tensor, (start, stop) in enumerate(layout.bounds):
        if pieces and _joins(layout, pieces[-1], stop - start):
            before = pieces.pop()
            pieces.append(Piece(before.start, stop, slice(before.tensors.start, tensor + 1)))
        else:
            parts = chunks(start, stop, device, multiple=DIGITS)
            pieces += [Piece(begin, end, slice(tensor, tensor + 1)) for begin, end in parts]
    return pieces


def _joins(layout: Layout, before: Piece, size: int) -> bool:
    """True if the next tensor joins a piece. Four numbers are drawn at a time, so its size must be a multiple of 4."""
    elements, many = before.stop - before.start, before.tensors.stop - before.tensors.start
    alike = layout.sizes[before.tensors.start] == size and elements == many * size
    return alike and size % 4 == 0 and elements + size <= CHUNK


@register("terngrad")
@dataclass(kw_only=True)
class TernGrad(LossyCompressor):
    """TernGrad: -s, 0 or +s for each element, unbiased; for any optimizer.

    Source: Wen et al., NeurIPS 2017, arXiv 1705.07878.

    Args:
        clip_sigma: number of standard deviations at which each tensor's gradient is clipped; 0 turns clipping off.
        share_scaler: use the largest s of all ranks for each tensor, found in one small all-reduce a step.
        error_feedback: add the error of clipping and rounding to the next gradient.
        dense_last_layer: send the model's last matrix uncompressed, as the authors' code does by default.
        seed: seed of the random draws, from 0 to 2^32 - 1.
        warmup_steps: dense steps before the quantisation begins. `None` means 22 (the paper has none).

    Raises:
        ValueError: if an option is out of its range.
    """

    card: ClassVar[Card] = Card(
        sends="-s, 0 or +s for each element, drawn at random",
        pick="memory is short: it keeps no residual",
        source="[Wen et al. 2017](https://arxiv.org/abs/1705.07878)",
    )
    default_warmup_steps: ClassVar[int] = DENSE_START

    clip_sigma: float = 2.5
    share_scaler: bool = True
    error_feedback: bool = False
    dense_last_layer: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.clip_sigma) or self.clip_sigma < 0:
            raise refusal("TernGrad.clip_sigma", self.clip_sigma, "0 (off) or a finite number above it")
        if not is_whole(self.seed) or not 0 <= self.seed < 2**32:
            raise refusal("TernGrad.seed", self.seed, "a whole number from 0 to 2^32 - 1")

    @property
    def not_partitioned_because(self) -> str | None:  # type: ignore[override]
        """Digits with different scalers can't be added."""
        return None if self.share_scaler else "digits add up only with one s for all workers (share_scaler=True)"

    def choose(self, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        chosen = [name for name, shape in shapes.items() if self.compresses(name, shape)]
        return set(chosen[:-1] if self.dense_last_layer else chosen)

    def state_for(self, optimizer: torch.optim.Optimizer | None) -> Update:
        """Nothing accumulates without `error_feedback`: rounding is unbiased."""
        return super().state_for(optimizer) if self.error_feedback else Update()

    def messages(self, layout: Layout) -> list[tuple[str, int]]:
        """The scalers if they are shared, then a payload of scalers and digits."""
        payload = ("gather", _payload_bytes(layout))
        return [("maximum", 4 * len(layout.sizes)), payload] if self.share_scaler else [payload]

    def partition_bytes(self, partition: Layout, workers: int, dense_pull: bool) -> tuple[int, int]:
        """Ternary digits to the owner, sums from it."""
        return packed_bytes(partition.n), _sum_bytes(partition.n, workers, dense_pull)

    def average(
        self, flat: torch.Tensor, layout: Layout, collectives: Collectives, state: Update
    ) -> tuple[Decoded, Decoded]:
        """Agree on the scalers, clip, ternarise, exchange, add."""
        with collectives.phase("compress"):
            limits = scalers_of(flat, layout, self.clip_sigma)
        scalers = collectives.maximum(limits) if self.share_scaler else limits
        uniform = Uniform(flat.device, self.seed, collectives.worker, collectives.step)
        step = _Step(layout, limits, scalers, uniform)
        if collectives.partitions is None:
            return collectives.mean_of_payloads(step, flat, layout)
        return step.mean_by_partitions(flat, collectives, collectives.partitions)


def scalers_of(flat: torch.Tensor, layout: Layout, c: float) -> torch.Tensor:
    """`scaler_of` each tensor of `flat` (fp32 [n]): fp32 [tensors]."""
    return torch.cat([scaler_of(each, c) for each in _rows_of_tensors(flat, layout)])


def _rows_of_tensors(flat: torch.Tensor, layout: Layout) -> Iterator[torch.Tensor]:
    """Yield all tensors as matrices. Consecutive small tensors of one size are the rows of one matrix."""
    start = 0
    for size, group in groupby(layout.sizes):
        stop = start + size * len(list(group))
        for begin, end in chunks(start, stop, flat.device, multiple=size):
            yield flat[begin:end].view(-1, size)
        start = stop


def _payload_bytes(layout: Layout) -> int:
    """Bytes of a payload: an s for each tensor, then the digits of each, padded to 4 bytes."""
    return sum(4 + padded(packed_bytes(size)) for size in layout.sizes)


class _Step(Payloads):
    """Writes and reads the digits of one worker's step.

    Args:
        layout: all compressed tensors.
        limits: the magnitude at which each tensor is clipped, fp32 [tensors].
        scalers: each tensor's s, fp32 [tensors].
        uniform: the draws, used in the buffer's order.
    """

    tensor_by_tensor: ClassVar[bool] = True

    def __init__(self, layout: Layout, limits: torch.Tensor, scalers: torch.Tensor, uniform: Uniform) -> None:
        self._layout, self._limits, self._scalers, self._uniform = layout, limits, scalers, uniform
        self._numbers = {name: number for number, name in enumerate(layout.names)}

    def _digits(self, part: torch.Tensor, tensors: slice) -> torch.Tensor:
        """The digits of part of a tensor, [1, n], or of several tensors, [m, n]."""
        if part.is_cuda or len(part) > 1:
            bounds = self._limits[tensors].unsqueeze(1)
            clipped = part.clamp(-bounds, bounds)
        else:  # on a CPU, clamping by Python numbers is five times as fast
            bound = float(self._limits[tensors])
            clipped = part.clamp(-bound, bound)
        return ternarise(clipped, self._scalers[tensors].unsqueeze(1), self._uniform)

    def payload_bytes(self, layout: Layout) -> int:
        """Bytes of a payload."""
        return _payload_bytes(layout)

    def pack(self, flat: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Chunked]:
        """The payload of whole tensors, and the decoded payload."""
        first, many = self._numbers[layout.names[0]], len(layout.names)
        payload = flat.new_zeros(_payload_bytes(layout), dtype=torch.uint8)
        payload[: 4 * many] = self._scalers[first : first + many].view(torch.uint8)
        for piece, place in _places(layout, flat.device):
            numbers = slice(first + piece.tensors.start, first + piece.tensors.stop)
            digits = self._digits(piece.of(flat), numbers)
            if len(digits) > 1:  # each tensor ends at a multiple of 4 bytes
                digits = torch.nn.functional.pad(digits, (0, -digits.shape[1] % (4 * DIGITS)))
            payload[place] = pack(digits.view(-1))
        return payload, self.unpack(payload, layout)

    def unpack(self, payload: torch.Tensor, layout: Layout) -> Chunked:
        """All tensors, decoded on demand."""
        scalers = payload[: 4 * len(layout.names)].view(torch.float32)
        places = _places(layout, payload.device)

        def values(number: int) -> torch.Tensor:
            piece, place = places[number]
            own, n = scalers[piece.tensors], piece.stop - piece.start
            if len(own) == 1:
                return unpack(payload[place], n).mul_(own)
            rows = unpack(payload[place], DIGITS * (place.stop - place.start)).view(len(own), -1)
            return (rows[:, : n // len(own)] * own.unsqueeze(1)).view(-1)

        return Chunked([(piece.start, piece.stop) for piece, _ in places], values)

    def mean_by_partitions(
        self, flat: torch.Tensor, collectives: Collectives, partitions: Partitions
    ) -> tuple[Dense, Chunked]:
        """Send digits to the owners of partitions, who send sums of digits to all. Returns (mean, what was sent)."""
        workers, base, slices = collectives.workers, 2 * collectives.workers + 1, partitions.slices
        with collectives.phase("compress"):
            pieces = pieces_of(self._layout, flat.device)
            digits = torch.cat([self._digits(piece.of(flat), piece.tensors).view(-1) for piece in pieces])
            payloads = [_pack_partition(each.of(digits)) for each in slices]
        rows = partitions.scatter(payloads)
        with collectives.phase("decompress"):
            sums = _sum_partition(rows, slices[collectives.worker].layout.n)
        with collectives.phase("compress"):
            payload = sums.view(torch.uint8) if partitions.dense_pull else radix.pack(sums, base)
        lengths = [_sum_bytes(each.layout.n, workers, partitions.dense_pull) for each in slices]
        rows = partitions.gather_partitions(payload, lengths)
        with collectives.phase("decompress"):
            mean = collectives.buffer()
            for each, row in zip(slices, rows, strict=True):
                if partitions.dense_pull:
                    each.of(mean).copy_(row.view(torch.float32))
                else:
                    radix.unpack(row, base, each.of(mean))
            per_digit = self._scalers / workers  # N · s may overflow fp32
            for piece in pieces:
                piece.of(mean).sub_(workers).mul_(per_digit[piece.tensors].unsqueeze(1))

        def sent(number: int) -> torch.Tensor:
            piece = pieces[number]
            return piece.of(digits).float().sub_(1).mul_(self._scalers[piece.tensors].unsqueeze(1)).view(-1)

        return Dense(mean), Chunked([(piece.start, piece.stop) for piece in pieces], sent)


def _places(layout: Layout, device: torch.device) -> list[tuple[Piece, slice]]:
    """The pieces of `pieces_of`, and where their digits are in a payload."""
    found, begin, before = [], 4 * len(layout.names), 0
    for piece in pieces_of(layout, device):
        if piece.tensors.start != before:
            begin, before = padded(begin), piece.tensors.start
        many = piece.tensors.stop - piece.tensors.start
        each = packed_bytes((piece.stop - piece.start) // many)
        end = begin + (each if many == 1 else many * padded(each))
        found.append((piece, slice(begin, end)))
        begin = end
    return found


def _sum_bytes(n: int, workers: int, dense_pull: bool) -> int:
    """Bytes of n sums of the workers' digits; fp32 with `dense_pull`."""
    return 4 * n if dense_pull else radix.packed_bytes(n, 2 * workers + 1)


def _pack_partition(digits: torch.Tensor) -> torch.Tensor:
    """A partition's ternary digits (uint8 [n]), five in a byte."""
    parts = chunks(0, digits.numel(), digits.device, multiple=DIGITS)
    return torch.cat([digits[:0], *(pack(digits[start:stop]) for start, stop in parts)])


def _sum_partition(rows: Sequence[torch.Tensor], n: int) -> torch.Tensor:
    """The sums (fp32 [n], 0 to 2N) of the digits that `_pack_partition` wrote on N workers."""
    sums = torch.empty(n, dtype=torch.float32, device=rows[0].device)
    table = _digit_table(sums.device) + 1
    for start, stop in chunks(0, n, sums.device, multiple=DIGITS):
        part = slice(start // DIGITS, start // DIGITS + packed_bytes(stop - start))
        first, *others = (look_up(table, row[part])[: stop - start] for row in rows)
        for other in others:
            first.add_(other)
        sums[start:stop] = first
    return sums
