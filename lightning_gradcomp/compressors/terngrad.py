"""TernGrad: Wen, Xu, Yan, Wu, Wang, Chen, Li, NeurIPS 2017, arXiv 1705.07878.

Each element becomes -s, 0 or +s at random, so that its expectation is what it was: sign(g) · s with probability |g|/s,
where s is the tensor's largest magnitude. Gradients are clipped at c standard deviations first, since s decides the
variance (§3, "gradient clipping"). All workers share the largest s ("scaler sharing"), so that their sum is a multiple
of one number. There is no error feedback: the rounding is unbiased. (What clipping cuts off is not; `error_feedback`
remembers both.)

The authors' published code sets s = c·σ, which clips too (what is above s is always sent as s), and sends floats. Here:
the paper's rule, and five ternary digits in a byte, a fixed length of 1.6 bits an element, close to log2 3 = 1.585. On
real gradients, most of which round to 0, the digits' zeroth-order entropy is 0.9 to 1.05 bits.

It extends `Lossy` and not `TensorCodec`, since its scalers are agreed between the workers before anything is encoded,
and since the owner of a shard adds up digits, not numbers: the sums of N workers' digits -1, 0, 1 are whole numbers
from -N to N, which go back exactly, as digits of base 2N + 1, log2(2N + 1) bits an element instead of 32 (§3). Nothing
is rounded twice, and the mean is that of an all-gather. A parameter server (topology="server") sends the sums as fp32.

What a worker draws is a function of (seed, worker, step).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch

from lightning_gradcomp.compressors.base import DENSE_START, Card, Collectives, Lossy
from lightning_gradcomp.compressors.decoded import Chunked, Decoded, Dense
from lightning_gradcomp.compressors.kernels import radix
from lightning_gradcomp.compressors.kernels.bits import look_up, padded
from lightning_gradcomp.compressors.kernels.rng import Uniform
from lightning_gradcomp.compressors.layout import Layout, Shard, chunks
from lightning_gradcomp.compressors.state import State
from lightning_gradcomp.errors import is_number, is_whole, refusal
from lightning_gradcomp.registry import register

DIGITS = 5
"""Ternary digits in a byte: 3^5 = 243."""


def scaler_of(g: torch.Tensor, c: float) -> torch.Tensor:
    """s (fp32 scalar) of g (fp32 [n]): its largest magnitude, but at most c standard deviations (c = 0: any number).

    They are around 0, which the paper takes for the mean. Squares of fp32 don't fit into fp32: s is divided out first.
    """
    largest = torch.stack(g.aminmax()).abs().max()
    if c == 0:
        return largest
    unit = largest.clamp(min=torch.finfo(torch.float32).tiny)
    parts = [g[start:stop] / unit for start, stop in chunks(0, g.numel(), g.device)]
    squares = torch.stack([torch.dot(part, part) for part in parts]).sum()
    return torch.minimum(largest, c * (squares / g.numel()).sqrt() * unit)


def ternarise(g: torch.Tensor, s: torch.Tensor, uniform: Uniform) -> torch.Tensor:
    """1 + t (uint8 [n]), where t is -1, 0 or 1 with expectation g / s, for g (fp32 [n]) within ±s; t = 0 where s is 0.

    t = floor(g / s + u), u uniform in (0, 1): the paper's sign(g) · b with P(b = 1) = |g| / s, in one pass.
    """
    per_s = 1 / s.clamp(min=torch.finfo(torch.float32).tiny)
    drawn = uniform.draw(g.numel(), 1.0).addcmul_(g, per_s)
    return drawn.to(torch.int8).view(torch.uint8)  # directly to uint8 it takes five times as long


def packed_bytes(n: int) -> int:
    """Bytes of n ternary digits."""
    return -(-n // DIGITS)


def pack(digits: torch.Tensor) -> torch.Tensor:
    """Five digits (uint8 [n], each 0, 1 or 2) in a byte, the first lowest: uint8 [ceil(n / 5)]."""
    if spare := -digits.numel() % DIGITS:
        digits = torch.nn.functional.pad(digits, (0, spare))
    columns = digits.view(-1, DIGITS).T
    if not digits.is_cuda:
        columns = columns.numpy()  # takes a third of the time
    packed = columns[DIGITS - 1] + 0
    for digit in reversed(range(DIGITS - 1)):
        packed *= 3
        packed += columns[digit]
    return torch.as_tensor(packed)


@cache
def _digit_table(device: torch.device) -> torch.Tensor:
    """The five digits of every byte that `pack` writes, less 1: fp32 [243, 5]."""
    powers = 3 ** torch.arange(DIGITS, device=device)
    return (torch.arange(3**DIGITS, device=device).unsqueeze(1) // powers % 3 - 1).float()


def unpack(packed: torch.Tensor, n: int) -> torch.Tensor:
    """The n digits that `pack` wrote, less 1: fp32 [n]."""
    return look_up(_digit_table(packed.device), packed)[:n]


def tensor_chunks(layout: Layout, device: torch.device) -> list[tuple[int, int, int]]:
    """(start, stop, number of the tensor) of what is drawn and packed at a time, in the flat buffer's order."""
    return [
        (start, stop, tensor)
        for tensor, (a, b) in enumerate(layout.bounds)
        for start, stop in chunks(a, b, device, multiple=DIGITS)
    ]


@register("terngrad")
@dataclass(kw_only=True)
class TernGrad(Lossy):
    """TernGrad: -s, 0 or +s for each element, unbiased; for any optimizer.

    Source: Wen et al., NeurIPS 2017, arXiv 1705.07878.

    Args:
        clip_sigma: standard deviations at which each tensor's gradient is clipped first; 0 is not at all.
        share_scaler: all workers use the largest s of each tensor, found in one small exchange a step.
        error_feedback: remember what clipping and rounding changed, and add it to the next gradient.
        dense_last_layer: leave the model's last matrix uncompressed, as the authors' code does by default.
        seed: of the draws.
        warmup_steps: dense steps before the quantisation begins. Default: 22 (the paper has none).

    Raises:
        ValueError: an option out of its range.
    """

    card: ClassVar[Card] = Card(
        sends="-s, 0 or +s for each element at random, five in a byte, and a tensor's s",
        pick="no memory to spare for a residual: what is sent is right on average",
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
    def not_sharded_because(self) -> str | None:  # type: ignore[override]
        """Digits of different scalers have no sum."""
        return None if self.share_scaler else "digits add up only with one s for all workers (share_scaler=True)"

    def choose(self, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        chosen = [name for name, shape in shapes.items() if self.takes(name, shape)]
        return set(chosen[:-1] if self.dense_last_layer else chosen)

    def remembers(self, optimizer: torch.optim.Optimizer | None) -> type[State]:
        """Nothing, without `error_feedback`: the rounding is unbiased."""
        return super().remembers(optimizer) if self.error_feedback else State

    def messages(self, layout: Layout) -> list[tuple[str, int]]:
        """The scalers, where they are shared, then scalers and digits."""
        payload = ("gather", _payload_bytes(layout))
        return [("maximum", 4 * len(layout.sizes)), payload] if self.share_scaler else [payload]

    def shard_bytes(self, shard: Layout, workers: int, dense_pull: bool) -> tuple[int, int]:
        """Digits of base 3 to the owner, sums from it."""
        back = 4 * shard.n if dense_pull else radix.packed_bytes(shard.n, 2 * workers + 1)
        return packed_bytes(shard.n), back

    def average(
        self, flat: torch.Tensor, layout: Layout, collectives: Collectives, state: State
    ) -> tuple[Decoded, Decoded]:
        """Agree on the scalers, clip, ternarise, exchange, add."""
        with collectives.phase("compress"):
            limits = torch.stack([scaler_of(flat[a:b], self.clip_sigma) for a, b in layout.bounds])
        scalers = collectives.maximum(limits) if self.share_scaler else limits
        uniform = Uniform(flat.device, self.seed, collectives.worker, collectives.step)
        bounds = limits if flat.is_cuda else limits.tolist()  # a CPU clamps by plain numbers five times as fast

        def digits_of(part: torch.Tensor, tensor: int) -> torch.Tensor:
            """The digits of a part of a tensor."""
            return ternarise(part.clamp(-bounds[tensor], bounds[tensor]), scalers[tensor], uniform)

        if collectives.shards is not None:
            return self._sharded(flat, digits_of, layout, scalers, collectives, collectives.shards)
        return collectives.mean_of_payloads(_Payloads(layout, digits_of, scalers), flat, layout)

    def _sharded(
        self,
        flat: torch.Tensor,
        digits_of: Callable[[torch.Tensor, int], torch.Tensor],
        layout: Layout,
        scalers: torch.Tensor,
        collectives: Collectives,
        shards: Sequence[Shard],
    ) -> tuple[Dense, Chunked]:
        """The same by shards: digits to their owners, who send sums of digits to everyone."""
        workers, base = collectives.workers, 2 * collectives.workers + 1
        with collectives.phase("compress"):
            places = tensor_chunks(layout, flat.device)
            digits = torch.cat([digits_of(flat[start:stop], tensor) for start, stop, tensor in places])
            payloads = [_pack_shard(shard.of(digits)) for shard in shards]
        rows = collectives.scatter(payloads)
        own = shards[collectives.worker].layout.n
        with collectives.phase("decompress"):
            sums = _sum_shard(rows, own)
        with collectives.phase("compress"):
            payload = sums.view(torch.uint8) if collectives.dense_pull else radix.pack(sums, base)
        lengths = [self.shard_bytes(shard.layout, workers, collectives.dense_pull)[1] for shard in shards]
        rows = collectives.gather_shards(payload, lengths)
        with collectives.phase("decompress"):
            mean = collectives.buffer()
            for shard, row in zip(shards, rows, strict=True):
                if collectives.dense_pull:
                    shard.of(mean).copy_(row.view(torch.float32))
                else:
                    radix.unpack(row, base, shard.of(mean))
            per_digit = scalers / workers  # N · s may be too large for fp32
            for start, stop, tensor in places:
                mean[start:stop].sub_(workers).mul_(per_digit[tensor])

        def sent(number: int) -> torch.Tensor:
            start, stop, tensor = places[number]
            return digits[start:stop].float().sub_(1).mul_(scalers[tensor])

        return Dense(mean), Chunked([(start, stop) for start, stop, _ in places], sent)


def _payload_bytes(layout: Layout) -> int:
    """Bytes of a payload: an s for each tensor, then its digits, padded to 4 bytes."""
    return sum(4 + padded(packed_bytes(size)) for size in layout.sizes)


class _Payloads:
    """The payloads of one step.

    Args:
        layout: all that is compressed.
        digits_of: from a part of a tensor, and the tensor's number, to digits; called in the buffer's order.
        scalers: each tensor's s, fp32 [tensors].
    """

    tensor_by_tensor: ClassVar[bool] = True

    def __init__(
        self, layout: Layout, digits_of: Callable[[torch.Tensor, int], torch.Tensor], scalers: torch.Tensor
    ) -> None:
        self._numbers = {name: number for number, name in enumerate(layout.names)}
        self._digits_of, self._scalers = digits_of, scalers

    def payload_bytes(self, layout: Layout) -> int:
        """Bytes of a payload."""
        return _payload_bytes(layout)

    def encode(self, flat: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Chunked]:
        """The payload of whole tensors, and what it decodes to."""
        numbers = [self._numbers[name] for name in layout.names]
        payload = flat.new_zeros(_payload_bytes(layout), dtype=torch.uint8)
        payload[: 4 * len(numbers)] = self._scalers[numbers[0] : numbers[-1] + 1].view(torch.uint8)
        for start, stop, tensor, place in _places(layout, flat.device):
            payload[place] = pack(self._digits_of(flat[start:stop], numbers[tensor]))
        return payload, self.decode(payload, layout)

    def decode(self, payload: torch.Tensor, layout: Layout) -> Chunked:
        """What a payload says."""
        scalers = payload[: 4 * len(layout.names)].view(torch.float32)
        places = _places(layout, payload.device)

        def values(number: int) -> torch.Tensor:
            start, stop, tensor, place = places[number]
            return unpack(payload[place], stop - start).mul_(scalers[tensor])

        return Chunked([(start, stop) for start, stop, *_ in places], values)


def _places(layout: Layout, device: torch.device) -> list[tuple[int, int, int, slice]]:
    """`tensor_chunks`, and where their digits are in a payload."""
    found, begin, before = [], 4 * len(layout.names), 0
    for start, stop, tensor in tensor_chunks(layout, device):
        if tensor != before:
            begin, before = padded(begin), tensor
        end = begin + packed_bytes(stop - start)
        found.append((start, stop, tensor, slice(begin, end)))
        begin = end
    return found


def _pack_shard(digits: torch.Tensor) -> torch.Tensor:
    """A shard's ternary digits (uint8 [n]), five in a byte."""
    parts = chunks(0, digits.numel(), digits.device, multiple=DIGITS)
    return torch.cat([digits[:0], *(pack(digits[start:stop]) for start, stop in parts)])


def _sum_shard(rows: Sequence[torch.Tensor], n: int) -> torch.Tensor:
    """The sums (fp32 [n], 0 to 2N) of the digits that `_pack_shard` wrote on N workers."""
    sums = torch.empty(n, dtype=torch.float32, device=rows[0].device)
    table = _digit_table(sums.device) + 1
    for start, stop in chunks(0, n, sums.device, multiple=DIGITS):
        part = slice(start // DIGITS, start // DIGITS + packed_bytes(stop - start))
        first, *others = (look_up(table, row[part])[: stop - start] for row in rows)
        for other in others:
            first.add_(other)
        sums[start:stop] = first
    return sums
