"""TernGrad: Wen, Xu, Yan, Wu, Wang, Chen, Li, NeurIPS 2017, arXiv 1705.07878.

Each element becomes -s, 0 or +s at random, so that its expectation is what it was: sign(g) · s with probability |g|/s,
where s is the tensor's largest magnitude. Gradients are clipped at c standard deviations first, since s decides the
variance (§3, "gradient clipping"). All ranks share the largest s ("scaler sharing"), so that their sum is a multiple of
one number. There is no error feedback: the rounding is unbiased. (What clipping cuts off is not; `error_feedback`
remembers both.)

The authors' published code sets s = c·σ without clipping first, and sends floats. Here: the paper's rule, and five
ternary digits in a byte, 1.6 bits an element against the ideal log2(3) = 1.585.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lightning_gradcomp.compressors.base import Card, Lossy
from lightning_gradcomp.compressors.draws import Drawing, Generator
from lightning_gradcomp.compressors.elementwise import look_up
from lightning_gradcomp.compressors.layout import Layout, cut
from lightning_gradcomp.compressors.sent import Mean, Piecewise, mean_of, read_all
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.lazy import torch
from lightning_gradcomp.registry import register

if TYPE_CHECKING:
    from lightning_gradcomp.averaging.exchange import Exchange

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
    pieces = [g[start:stop] / unit for start, stop in cut(0, g.numel(), g.device)]
    squares = torch.stack([torch.dot(piece, piece) for piece in pieces]).sum()
    return torch.minimum(largest, c * (squares / g.numel()).sqrt() * unit)


def ternarise(g: torch.Tensor, s: torch.Tensor, generator: Generator) -> torch.Tensor:
    """1 + t (uint8 [n]), where t is -1, 0 or 1 with expectation g / s, for g (fp32 [n]) within ±s; t = 0 where s is 0.

    t = floor(g / s + u), u uniform in (0, 1): the paper's sign(g) · b with P(b = 1) = |g| / s, in one pass.
    """
    per_s = 1 / s.clamp(min=torch.finfo(torch.float32).tiny)
    drawn = generator.uniform(g.numel(), 1.0).addcmul_(g, per_s)
    return drawn.to(torch.int8).view(torch.uint8)  # at once to uint8 it takes five times as long


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


def table_of(device: torch.device) -> torch.Tensor:
    """The five digits of every byte that `pack` writes, less 1: fp32 [243, 5]."""
    powers = 3 ** torch.arange(DIGITS, device=device)
    return (torch.arange(3**DIGITS, device=device).unsqueeze(1) // powers % 3 - 1).float()


def unpack(packed: torch.Tensor, n: int, table: torch.Tensor) -> torch.Tensor:
    """The n digits that `pack` wrote, less 1, as fp32, from `table_of` its device."""
    return look_up(table, packed)[:n]


def pieces(layout: Layout, device: torch.device) -> list[tuple[int, int, int]]:
    """(start, stop, number of the tensor) of what is drawn and packed at once, in the flat buffer's order."""
    return [
        (start, stop, tensor)
        for tensor, (a, b) in enumerate(layout.bounds)
        for start, stop in cut(a, b, device, multiple=DIGITS)
    ]


@register("terngrad")
@dataclass(kw_only=True, slots=True)
class TernGrad(Lossy):
    """TernGrad: -s, 0 or +s for each element, unbiased; for any optimizer.

    Source: Wen et al., NeurIPS 2017, arXiv 1705.07878.

    Args:
        clip_sigma: standard deviations at which each tensor's gradient is clipped first; 0 is not at all.
        share_scaler: all ranks use the largest s of each tensor, found in one small exchange a step.
        error_feedback: remember what clipping and rounding changed, and add it to the next gradient.
        dense_last_layer: leave the model's last matrix uncompressed, as the authors' code does by default.
        seed: of the draws; each rank has its own generator, from seed and rank, which checkpoints hold.
        warmup_epochs: dense epochs before the quantisation begins (the paper has none).

    Raises:
        ValueError: an option out of its range.
    """

    card: ClassVar[Card] = Card(
        sends="-s, 0 or +s for each element at random, five in a byte, and a tensor's s",
        remembers="a random generator",
        pick="no memory to spare for a residual: what is sent is right on average",
        source="[Wen et al. 2017](https://arxiv.org/abs/1705.07878)",
    )

    clip_sigma: float = 2.5
    share_scaler: bool = True
    error_feedback: bool = False
    dense_last_layer: bool = False
    seed: int = 0
    warmup_epochs: int = 1

    def __post_init__(self) -> None:
        super(TernGrad, self).__post_init__()
        if not 0 <= self.clip_sigma < float("inf"):
            raise refusal("TernGrad.clip_sigma", self.clip_sigma, "0 (off) or a finite number above it")
        if not 0 <= self.seed < 2**32:
            raise refusal("TernGrad.seed", self.seed, "0 to 2^32 - 1")

    def choose(self, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        chosen = [name for name, shape in shapes.items() if self.takes(name, shape)]
        return set(chosen[:-1] if self.dense_last_layer else chosen)

    def memory(self, layout: Layout, device: torch.device, rank: int) -> Drawing:
        """A generator, and a residual with `error_feedback`."""
        return Drawing(layout, device, self.seed * 1_000_003 + rank, self.error_feedback)

    def messages(self, layout: Layout, density: float) -> list[tuple[str, int]]:
        """The scalers, where they are shared, then scalers and digits."""
        payload = ("gather", sum(4 + packed_bytes(size) for size in layout.sizes))
        return [("maximum", 4 * len(layout.sizes)), payload] if self.share_scaler else [payload]

    def average(
        self, flat: torch.Tensor, layout: Layout, density: float, exchange: Exchange, memory: Drawing
    ) -> tuple[Mean, Piecewise]:
        """Agree on the scalers, clip, ternarise, gather."""
        limits, scalers = self.scalers(flat, layout, exchange)

        def packed(generator: Generator) -> torch.Tensor:
            return torch.cat([pack(digits) for digits in self.digits(flat, layout, limits, scalers, generator)])

        with exchange.stats.phase("compress"):
            payload = torch.cat([scalers.view(torch.uint8), memory.draw(packed)])
        payloads = exchange.gather(payload)
        with exchange.stats.phase("decompress"):
            sent = self.decode(payload, layout)
            everyones = read_all(payloads, exchange.ranks.worker, sent, lambda row: self.decode(row, layout))
            return mean_of(everyones, exchange.buffer), sent

    def scalers(self, flat: torch.Tensor, layout: Layout, exchange: Exchange) -> tuple[torch.Tensor, torch.Tensor]:
        """At what each tensor of `flat` is clipped, and the s that its digits stand for: fp32 [tensors] both."""
        with exchange.stats.phase("compress"):
            limits = torch.stack([scaler_of(flat[a:b], self.clip_sigma) for a, b in layout.bounds])
        return limits, exchange.maximum(limits) if self.share_scaler else limits

    def digits(
        self, flat: torch.Tensor, layout: Layout, limits: torch.Tensor, scalers: torch.Tensor, generator: Generator
    ) -> Iterator[torch.Tensor]:
        """The digits that `ternarise` draws for `flat`, a piece of `pieces` at a time."""
        bounds = limits if flat.is_cuda else limits.tolist()  # a CPU clamps by plain numbers five times as fast
        for start, stop, tensor in pieces(layout, flat.device):
            limit = bounds[tensor]
            yield ternarise(flat[start:stop].clamp(-limit, limit), scalers[tensor], generator)

    def decode(self, payload: torch.Tensor, layout: Layout) -> Piecewise:
        """What a rank sent, from its payload."""
        begin, table = 4 * len(layout.sizes), table_of(payload.device)
        scalers = payload[:begin].view(torch.float32)
        places, parts = [], []
        for start, stop, tensor in pieces(layout, payload.device):
            end = begin + packed_bytes(stop - start)
            places.append((start, stop))
            parts.append((payload[begin:end], stop - start, scalers[tensor]))
            begin = end

        def values(number: int) -> torch.Tensor:
            packed, n, s = parts[number]
            return unpack(packed, n, table).mul_(s)

        return Piecewise(places, values)
