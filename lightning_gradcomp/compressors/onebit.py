"""1-bit SGD: Seide, Fu, Droppo, Li, Yu, Interspeech 2014.

Each element of residual + gradient is sent as one bit. Each group of elements also sends two values, one for each bit:
the means of the elements on either side of a threshold. A group is a column of the paper's matrices, one unit's fan-in,
which is a row of PyTorch's weight. With one scale for a whole tensor, whose elements differ in size, the error stays
larger than the gradient. Groups never span two parameters. A group of zeros decodes to exactly 0. In a group of several
rows, one more bit per row marks rows of zeros, which also decode to 0. Weights without a gradient, such as those of
padding, therefore do not move.

The paper's threshold is 0. Its authors' CNTK can also use the group's mean, with two values at equal distances from it.
Here the default is the mean, with the mean of either side, which leaves a smaller error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from lightning_gradcomp.compressors.base import DENSE_START, Card
from lightning_gradcomp.compressors.kernels.bits import bit_table, greater_equal, look_up, pack_bits, unpack_bits
from lightning_gradcomp.compressors.kernels.rows import Rows
from lightning_gradcomp.compressors.layout import Layout, chunks
from lightning_gradcomp.compressors.tensor_codec import TensorCodec
from lightning_gradcomp.errors import check_whole, refusal
from lightning_gradcomp.registry import register


def quantise(v: torch.Tensor, groups: Rows, threshold: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits (bool) of v (fp32 [n]), and the values of each group (fp32 [groups, 2]: for bit 0, for bit 1).

    A bit is set if v is at least the threshold, 0 or the group's mean μ. The values are the means of either side (0 or
    μ for an empty side). No other two values have a smaller squared error, and they keep each group's sum.
    """
    v, size = groups.view(v), groups.sizes(v.device)
    if threshold == "mean":
        mean = groups.sum(v) / size
        [center] = groups.spread(mean)
        above = v - center
        bits = greater_equal(above, 0)
        ones, excess = groups.sum(bits.view(torch.uint8), torch.int32), groups.sum(above.clamp_(min=0))
        many = torch.stack([ones - size, ones], 1)  # the excess above μ equals the deficit below
        return bits, excess.unsqueeze(1) / many.masked_fill_(many == 0, 1) + mean.unsqueeze(1)
    bits = greater_equal(v, 0)
    ones = groups.sum(bits.view(torch.uint8), torch.int32)
    sum_of_ones, sum_of_zeros = groups.sum(v.clamp(min=0)), groups.sum(v.clamp(max=0))
    return bits, torch.stack([sum_of_zeros / (size - ones).clamp(min=1), sum_of_ones / ones.clamp(min=1)], 1)


def dequantise(bits: torch.Tensor, groups: Rows, pair: torch.Tensor) -> torch.Tensor:
    """low + bit · (high - low), for bits (fp32 [n], 0 or 1; overwritten) and `pair` (fp32 [groups, 2]).

    Rounding may change the last bit of `high`, identically on every rank. torch.where takes ten times as long on a CPU.
    """
    low, high = pair.unbind(1)
    low, step = groups.spread(low, high - low)
    return groups.view(bits).mul_(step).add_(low)


def row_size(shape: tuple[int, ...]) -> int:
    """Elements of a unit's fan-in in a weight of this shape. In [1, positions, width], a unit is a position."""
    while len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    return math.prod(shape[1:])


@register("onebit")
@dataclass(kw_only=True)
class OneBit(TensorCodec):
    """1-bit SGD: a bit for each element, two means for each group, error feedback; for any optimizer.

    Source: Seide et al., Interspeech 2014.

    Args:
        groups: which elements share two values: a unit's fan-in (`"column"`, as in the paper), `group_size`
            consecutive elements (`"block"`) or a whole tensor (`"tensor"`).
        group_size: elements of a block, with `groups="block"`.
        threshold: what decides the bit: the group's mean (`"mean"`) or 0 (`"zero"`, as in the paper).
        error_feedback: add the quantisation error of a step to the next gradient.
        warmup_steps: dense steps before the quantisation begins. `None` means 22 (the paper also begins with
            unquantised data).

    Raises:
        ValueError: if an option is out of its range.
    """

    card: ClassVar[Card] = Card(
        sends="one bit for each element, two values for each fan-in",
        pick="rounds of `dga`, or if every element must move at every step",
        source="Seide et al., Interspeech 2014",
    )
    default_warmup_steps: ClassVar[int] = DENSE_START

    _row: ClassVar[int] = 0
    """Elements of a row in a tensor whose groups are not whole parts of a row, else 0. `for_tensor` sets it."""
    _many: ClassVar[tuple[Rows, Rows] | None] = None
    """The tensors and the groups of several tensors. `for_tensors` sets them."""

    groups: str = "column"
    group_size: int = 512
    threshold: str = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups not in ("block", "column", "tensor"):
            raise refusal("OneBit.groups", self.groups, "'block', 'column' or 'tensor'")
        if self.threshold not in ("zero", "mean"):
            raise refusal("OneBit.threshold", self.threshold, "'zero' or 'mean'")
        check_whole("OneBit.group_size", self.group_size, 1)

    def compresses(self, name: str, shape: tuple[int, ...]) -> bool:
        """True if the base class compresses it and its columns are long enough to save bytes."""
        return super().compresses(name, shape) and (self.groups != "column" or row_size(shape) > 2)

    def for_tensor(self, name: str, shape: tuple[int, ...]) -> OneBit:
        n, row = math.prod(shape), row_size(shape)
        size = min({"block": self.group_size, "column": row, "tensor": n}[self.groups], n)
        codec: Any = replace(self, groups="block", group_size=size)
        if row < n and row % size:
            codec._row = row
        return codec

    def for_tensors(self, layout: Layout) -> OneBit | None:
        """Returns a codec for all tensors, unless one has groups of several rows."""
        codecs = [self.for_tensor(name, shape) for name, shape in zip(layout.names, layout.shapes, strict=True)]
        if any(codec._row for codec in codecs):
            return None
        groups = (Rows.cut(n, codec.group_size).runs for n, codec in zip(layout.sizes, codecs, strict=True))
        codec: Any = replace(self)
        codec._many = Rows.of(layout.sizes), Rows.join(run for runs in groups for run in runs)
        return codec

    @property
    def chunk(self) -> int | None:
        """Whole groups and whole bytes."""
        return None if self._row else math.lcm(self.group_size, 8)

    def encode(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The two means of each group, the bits of all elements, and if needed a bit per row, set if it isn't all 0."""
        if self._many:
            tensors, groups = self._many
            bits, means = quantise(x, groups, self.threshold)
            return [means, pack_bits(tensors.pad(bits, 8))]
        means, packed = [], []
        for start, stop in chunks(0, len(x), x.device, multiple=math.lcm(self.group_size, 8)):
            bits, pairs = quantise(x[start:stop], Rows.cut(stop - start, self.group_size), self.threshold)
            means.append(pairs)
            packed.append(pack_bits(bits))
        parts = [torch.cat(means), torch.cat(packed)]
        if self._row:
            parts.append(pack_bits(x.view(-1, self._row).any(1)))
        return parts

    def decode(self, parts: Sequence[torch.Tensor], n: int) -> torch.Tensor:
        means, packed, *rows = parts
        bits = look_up(bit_table(packed.device), packed)
        if self._many:
            tensors, groups = self._many
            return dequantise(tensors.unpad(bits, 8), groups, means).view(-1)
        values = dequantise(bits[:n], Rows.cut(n, self.group_size), means).view(-1)
        for any_in_row in rows:
            values.view(-1, self._row).mul_(unpack_bits(any_in_row, n // self._row).unsqueeze(1))
        return values
