"""1-bit SGD: Seide, Fu, Droppo, Li, Yu, Interspeech 2014.

Each element of residual + gradient is sent as one bit, and each group of elements with the two values that the bits
stand for: the means of the elements on either side of a threshold. The paper has one group a column, which is one
unit's fan-in (a row of PyTorch's weight), and threshold 0; its authors' CNTK also has the mean as threshold. Groups of
512 are the default here: with one scale for elements of different size the error stays larger than the gradient.
Groups never span two parameters. A group of zeros decodes to exactly 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from lightning_gradcomp.compressors.base import Card, Codec
from lightning_gradcomp.compressors.elementwise import at_least, look_up
from lightning_gradcomp.compressors.layout import Layout, cut
from lightning_gradcomp.compressors.memory import Residual
from lightning_gradcomp.compressors.sent import Piecewise
from lightning_gradcomp.compressors.wire import pack_bits
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.lazy import torch
from lightning_gradcomp.registry import register


def quantise(v: torch.Tensor, threshold: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits (bool [groups, size]) and their two values (fp32 [groups, 2]: of bit 0, of bit 1) of v [groups, size].

    "zero": bit = v ≥ 0, the values are the means of either side, 0 for an empty one. "mean": bit = v ≥ μ, the values
    are μ ± mean|v - μ|. "zero" keeps each group's sum.
    """
    if threshold == "mean":
        mean = v.mean(1, keepdim=True)
        deviation = (v - mean).abs().mean(1, keepdim=True)
        return v >= mean, torch.cat([mean - deviation, mean + deviation], 1)
    bits = at_least(v, 0)
    ones = bits.view(torch.uint8).sum(1, dtype=torch.int32)
    of_ones, of_zeros = v.clamp(min=0).sum(1), v.clamp(max=0).sum(1)
    return bits, torch.stack([of_zeros / (v.shape[1] - ones).clamp(min=1), of_ones / ones.clamp(min=1)], 1)


def values_of(bits: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
    """low + bit · (high - low), for `bits` (fp32 [groups, size], each 0 or 1; used up) and `pair` (fp32 [groups, 2]).

    That is `high` but for its last bit, on every rank alike. torch.where takes ten times as long on a CPU.
    """
    low, high = pair[:, :1], pair[:, 1:]
    return bits.mul_(high - low).add_(low)


def table_of(device: torch.device) -> torch.Tensor:
    """The eight bits of every byte, the lowest first: fp32 [256, 8]."""
    return (torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device) & 1).float()


def packed_bytes(n: int) -> int:
    """Bytes of n bits."""
    return -(-n // 8)


@register("onebit")
@dataclass(kw_only=True, slots=True)
class OneBit(Codec):
    """1-bit SGD: a sign for each element, two means for each group, error feedback; for any optimizer.

    Source: Seide et al., Interspeech 2014.

    Args:
        groups: "block" (of `group_size` consecutive elements), "column" (a unit's fan-in, as in the paper) or "tensor".
        group_size: elements of a block; 512 costs 1.125 bits an element.
        threshold: "zero" or "mean".
        warmup_epochs: dense epochs before the quantisation begins (the paper begins with unquantised data too).

    Raises:
        ValueError: an option out of its range.
    """

    card: ClassVar[Card] = Card(
        sends="a sign for each element, two fp32 means for each group of 512",
        remembers="a residual",
        pick="every element should move at every step; any optimizer",
        source="Seide et al., Interspeech 2014",
    )

    groups: str = "block"
    group_size: int = 512
    threshold: str = "zero"
    warmup_epochs: int = 1

    def __post_init__(self) -> None:
        super(OneBit, self).__post_init__()
        if self.groups not in ("block", "column", "tensor"):
            raise refusal("OneBit.groups", self.groups, "'block', 'column' or 'tensor'")
        if self.threshold not in ("zero", "mean"):
            raise refusal("OneBit.threshold", self.threshold, "'zero' or 'mean'")
        if not isinstance(self.group_size, int) or self.group_size < 1:
            raise refusal("OneBit.group_size", self.group_size, "a whole number from 1")

    def memory(self, layout: Layout, device: torch.device, rank: int) -> Residual:
        """A residual of every compressed parameter."""
        return Residual(layout, device)

    def _pieces(self, layout: Layout, device: torch.device) -> list[tuple[int, int, int]]:
        """(start, stop, group size) of runs of equal groups: a tensor's full groups, a few at a time, then its rest.

        Runs begin with a byte of their own, also where they are cut: what is sent is the same from any device.
        """
        pieces = []
        for (start, stop), shape in zip(layout.bounds, layout.shapes, strict=True):
            n = stop - start
            size = min(n, {"block": self.group_size, "column": n // shape[0], "tensor": n}[self.groups])
            full = stop - n % size
            pieces += [(first, last, size) for first, last in cut(start, full, device, multiple=math.lcm(size, 8))]
            if n % size:
                pieces.append((full, stop, n % size))
        return pieces

    def payload_bytes(self, layout: Layout, density: float) -> int:
        """Two fp32 a group, a bit an element."""
        pieces = self._pieces(layout, torch.device("cpu"))
        return sum(8 * ((stop - start) // size) + packed_bytes(stop - start) for start, stop, size in pieces)

    def encode(self, flat: torch.Tensor, layout: Layout, density: float) -> tuple[torch.Tensor, Piecewise]:
        """The means of all groups and the bits of all elements."""
        packed, means = [], []
        for start, stop, size in self._pieces(layout, flat.device):
            bits, pair = quantise(flat[start:stop].view(-1, size), self.threshold)
            packed.append(pack_bits(bits.view(torch.uint8).view(-1)))
            means.append(pair)
        payload = torch.cat([torch.cat(means).view(-1).view(torch.uint8), *packed])
        return payload, self.decode(payload, layout, density)

    def decode(self, payload: torch.Tensor, layout: Layout, density: float) -> Piecewise:
        """What a rank sent, from its payload: its own means, never recomputed."""
        pieces = self._pieces(layout, payload.device)
        counts = [(stop - start) // size for start, stop, size in pieces]
        length = 8 * sum(counts)
        pairs = payload[:length].view(torch.float32).view(-1, 2).split(counts)
        packed = payload[length:].split([packed_bytes(stop - start) for start, stop, _ in pieces])
        table = table_of(payload.device)

        def values(number: int) -> torch.Tensor:
            start, stop, size = pieces[number]
            bits = look_up(table, packed[number])[: stop - start]
            return values_of(bits.view(-1, size), pairs[number]).view(-1)

        return Piecewise([(start, stop) for start, stop, _ in pieces], values)
