"""1-bit SGD: Seide, Fu, Droppo, Li, Yu, Interspeech 2014.

Each element of residual + gradient is sent as one bit, and each group of elements with the two values that the bits
stand for: the means of the elements on either side of a threshold. A group is a column of the paper's matrices, one
unit's fan-in: a row of PyTorch's weight. With one scale for a whole tensor, whose elements differ in size, the error
stays larger than the gradient. Groups never span two parameters. A group of zeros decodes to exactly 0.

The paper's threshold is 0. Its authors' CNTK also has the group's mean, with two values at equal distances from it.
Here it is the mean, with the means of either side, which leave a smaller error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from lightning_gradcomp.compressors.base import DENSE_START, Card, TensorCodec
from lightning_gradcomp.compressors.kernels.bits import bit_table, greater_equal, look_up, pack_bits
from lightning_gradcomp.compressors.layout import chunks
from lightning_gradcomp.errors import is_whole, refusal
from lightning_gradcomp.registry import register


def quantise(v: torch.Tensor, threshold: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits (bool [groups, size]) and their two values (fp32 [groups, 2]: of bit 0, of bit 1) of v [groups, size].

    The bit says whether v is at least the threshold, 0 or the group's mean μ. The values are the means of either side
    (0 or μ for an empty one): no other two values have a smaller squared error, and they keep each group's sum.
    """
    if threshold == "mean":
        mean = v.mean(1, keepdim=True)
        above = v - mean
        bits = greater_equal(above, 0)
        ones, excess = bits.view(torch.uint8).sum(1, dtype=torch.int32), above.clamp_(min=0).sum(1)  # = what is below
        zeros, mean = (
            (v.shape[1] - ones).clamp(min=1),
            mean.squeeze(1),
        )  # what is above μ on one side is below on the other
        return bits, torch.stack([mean - excess / zeros, mean + excess / ones.clamp(min=1)], 1)
    bits = greater_equal(v, 0)
    ones = bits.view(torch.uint8).sum(1, dtype=torch.int32)
    sum_of_ones, sum_of_zeros = v.clamp(min=0).sum(1), v.clamp(max=0).sum(1)
    return bits, torch.stack([sum_of_zeros / (v.shape[1] - ones).clamp(min=1), sum_of_ones / ones.clamp(min=1)], 1)


def dequantise(bits: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
    """low + bit · (high - low), for bits (fp32 [groups, size], 0 or 1; overwritten) and `pair` (fp32 [groups, 2]).

    That is `high` but for its last bit, on every rank alike. torch.where takes ten times as long on a CPU.
    """
    low, high = pair[:, :1], pair[:, 1:]
    return bits.mul_(high - low).add_(low)


@register("onebit")
@dataclass(kw_only=True)
class OneBit(TensorCodec):
    """1-bit SGD: a bit for each element, two means for each group, error feedback; for any optimizer.

    Source: Seide et al., Interspeech 2014.

    Args:
        groups: "column" (a unit's fan-in, as in the paper), "block" (of `group_size` consecutive elements) or "tensor".
            Groups of g elements cost 1 + 64 / g bits an element.
        group_size: elements of a block.
        threshold: "mean" or "zero".
        warmup_steps: dense steps before the quantisation begins. Default: 22 (the paper begins with unquantised data
            too).

    Raises:
        ValueError: an option out of its range.
    """

    card: ClassVar[Card] = Card(
        sends="a bit for each element, two fp32 means for each unit's fan-in",
        remembers="a residual",
        pick="every element should move at every step; any optimizer",
        source="Seide et al., Interspeech 2014",
    )
    default_warmup_steps: ClassVar[int] = DENSE_START

    groups: str = "column"
    group_size: int = 512
    threshold: str = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups not in ("block", "column", "tensor"):
            raise refusal("OneBit.groups", self.groups, "'block', 'column' or 'tensor'")
        if self.threshold not in ("zero", "mean"):
            raise refusal("OneBit.threshold", self.threshold, "'zero' or 'mean'")
        if not is_whole(self.group_size) or self.group_size < 1:
            raise refusal("OneBit.group_size", self.group_size, "a whole number from 1")

    def for_tensor(self, name: str, shape: tuple[int, ...]) -> OneBit:
        """With the size of this tensor's groups."""
        n = math.prod(shape)
        size = {"block": self.group_size, "column": n // shape[0], "tensor": n}[self.groups]
        return replace(self, groups="block", group_size=min(size, n))

    @property
    def chunk(self) -> int:
        """Whole groups and whole bytes."""
        return math.lcm(self.group_size, 8)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two means of each group, and the bits of all elements."""
        means, packed = [], []
        for start, stop in chunks(0, len(x), x.device, multiple=self.chunk):
            full = stop - (stop - start) % self.group_size
            ends = [(a, b) for a, b in ((start, full), (full, stop)) if a < b]
            groups = [x[a:b].view(-1, min(self.group_size, b - a)) for a, b in ends]
            bits, pairs = zip(*(quantise(group, self.threshold) for group in groups), strict=True)
            means += pairs
            packed.append(pack_bits(bits[0] if len(bits) == 1 else torch.cat([part.view(-1) for part in bits])))
        return torch.cat(means), torch.cat(packed)

    def decode(self, parts: Sequence[torch.Tensor], n: int) -> torch.Tensor:
        """Each element's mean of the two."""
        means, packed = parts
        bits, full = look_up(bit_table(packed.device), packed)[:n], n - n % self.group_size
        dequantise(bits[:full].view(-1, self.group_size), means[: full // self.group_size])
        if full < n:
            dequantise(bits[full:].view(1, -1), means[-1:])
        return bits
