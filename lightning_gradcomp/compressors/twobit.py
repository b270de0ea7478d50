"""2-bit quantisation with threshold and residual, as in MXNet's kvstore (src/kvstore/gradient_compression).

Element by element, with r the residual plus the gradient: r ≥ t sends code 11 and takes t from r; r ≤ -t sends 10 and
adds t; anything between sends 00. Both comparisons are inclusive. MXNet's order of bits: four elements a byte, the
first in the top two bits, each tensor padded to four bytes.

MXNet's t = 0.5 is in units of gradients summed over the batch. PyTorch's losses are means over it, whose gradients are
smaller by the batch size, so 0.5 would send nothing for hundreds of steps. `threshold="auto"` takes `best_threshold` of
each tensor at each step, and sends that t along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from lightning_gradcomp.compressors.base import Card, Codec
from lightning_gradcomp.compressors.elementwise import at_least, interleave, look_up
from lightning_gradcomp.compressors.layout import Layout, cut
from lightning_gradcomp.compressors.memory import Residual
from lightning_gradcomp.compressors.sent import Piecewise
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.lazy import torch
from lightning_gradcomp.registry import register


def packed_bytes(n: int) -> int:
    """Bytes of n codes: 16 in each 4-byte word."""
    return (n + 15) // 16 * 4


def best_threshold(r: torch.Tensor) -> torch.Tensor:
    """Σr² / (√2 · Σ|r|) of r (fp32 [n]): where sending -t, 0 or +t leaves the least of it; fp32 scalar.

    The part of E[r²] that is sent is ∫ (2t|r| - t²) over |r| ≥ t. For a Laplace distribution of scale b it is greatest
    at t = √2 · b, and Σr² / Σ|r| is 2b; a normal distribution's best t is within a hundredth of the same formula.
    Elements that are 0 don't change t, unlike a mean magnitude, which many of them drive towards 0: what is above t
    leaves by t a step, so that most of r would stay for dozens of steps.
    """
    pieces = [r[start:stop] for start, stop in cut(0, r.numel(), r.device)]
    tiny = torch.finfo(torch.float32).tiny  # a tensor of zeros has no such t, and at 0 every element would send ±0
    mean = torch.clamp(torch.stack([piece.abs().sum() for piece in pieces]).sum() / r.numel(), min=tiny)
    # Squared in units of their mean: gradients of 1e-20 or 1e20 would be squared to 0 or infinity.
    squares = torch.stack([(piece / mean).square_().sum() for piece in pieces]).sum()
    return torch.clamp(0.5**0.5 * mean * (squares / r.numel()), min=tiny)


def pack(r: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The codes of r (fp32 [n]) at threshold t (fp32 scalar): uint8 [packed_bytes(n)] in MXNet's order."""
    codes = interleave(at_least(r.abs(), t), at_least(r, t))  # 11, 10 or 00
    return torch.nn.functional.pad(codes, (0, packed_bytes(r.numel()) - codes.numel()))


def table_of(t: torch.Tensor) -> torch.Tensor:
    """The four values (each +t, -t or 0) of every byte there is, for threshold t (fp32 scalar): fp32 [256, 4]."""
    shifts = torch.arange(6, -1, -2, device=t.device)
    codes = (torch.arange(256, device=t.device).unsqueeze(1) >> shifts) & 3
    return torch.stack([torch.zeros_like(t), torch.zeros_like(t), -t, t])[codes]


def unpack(packed: torch.Tensor, n: int, table: torch.Tensor) -> torch.Tensor:
    """The values (fp32 [n]) that `pack` wrote, from `table_of` its threshold."""
    return look_up(table, packed)[:n]


@register("twobit")
@dataclass(kw_only=True, slots=True)
class TwoBit(Codec):
    """2-bit threshold quantisation with residual (MXNet); for any optimizer.

    Source: MXNet, src/kvstore/gradient_compression.

    Args:
        threshold: "auto" (`best_threshold` of each tensor, at each step), or a number above 0: MXNet's rule, in units
            of the gradient; MXNet's own default, 0.5, is meant for gradients summed over a batch.
        warmup_epochs: dense epochs before the quantisation begins (MXNet has none, and trains the worse for it).

    Raises:
        ValueError: an option out of its range.
    """

    card: ClassVar[Card] = Card(
        sends="-t, 0 or +t for each element, and a tensor's t",
        remembers="a residual",
        pick="MXNet's rule is wanted; otherwise 1-bit SGD sends half as much",
        source="[MXNet's kvstore](https://mxnet.apache.org/api/faq/gradient_compression)",
    )

    threshold: Any = "auto"  # "auto" or a number; the command line's types have no union of the two
    warmup_epochs: int = 1

    def __post_init__(self) -> None:
        super(TwoBit, self).__post_init__()
        number = isinstance(self.threshold, (int, float)) and not isinstance(self.threshold, bool)
        if self.threshold != "auto" and not (number and 0 < self.threshold < float("inf")):
            raise refusal("TwoBit.threshold", self.threshold, "'auto' or a number above 0")

    def memory(self, layout: Layout, device: torch.device, rank: int) -> Residual:
        """A residual of every compressed parameter."""
        return Residual(layout, device)

    def _threshold(self, r: torch.Tensor) -> torch.Tensor:
        if self.threshold != "auto":
            return torch.full((), float(self.threshold), device=r.device)
        return best_threshold(r)

    def payload_bytes(self, layout: Layout, density: float) -> int:
        """An fp32 threshold a tensor, two bits an element."""
        return sum(4 + packed_bytes(size) for size in layout.sizes)

    def encode(self, flat: torch.Tensor, layout: Layout, density: float) -> tuple[torch.Tensor, Piecewise]:
        """The thresholds of all tensors, then the codes of each."""
        thresholds = torch.stack([self._threshold(flat[a:b]) for a, b in layout.bounds])
        codes = [
            pack(flat[start:stop], t)
            for (a, b), t in zip(layout.bounds, thresholds, strict=True)
            for start, stop in cut(a, b, flat.device, multiple=16)
        ]
        payload = torch.cat([thresholds.view(torch.uint8), *codes])
        return payload, self.decode(payload, layout, density)

    def decode(self, payload: torch.Tensor, layout: Layout, density: float) -> Piecewise:
        """What a rank sent, from its payload."""
        begin = 4 * len(layout.sizes)
        pieces, parts = [], []
        for (a, b), t in zip(layout.bounds, payload[:begin].view(torch.float32), strict=True):
            table = table_of(t)
            for start, stop in cut(a, b, payload.device, multiple=16):
                end = begin + packed_bytes(stop - start)
                pieces.append((start, stop))
                parts.append((payload[begin:end], stop - start, table))
                begin = end
        return Piecewise(pieces, lambda number: unpack(*parts[number]))
