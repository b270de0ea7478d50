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
from lightning_gradcomp.compressors.layout import chunks
from lightning_gradcomp.compressors.tensor_codec import TensorCodec
from lightning_gradcomp.errors import is_whole, refusal
from lightning_gradcomp.registry import register


def quantise(v: torch.Tensor, threshold: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits (bool [groups, size]) of v [groups, size], and their values (fp32 [groups, 2]: for bit 0, for bit 1).

    A bit is set if v is at least the threshold, 0 or the group's mean μ. The values are the means of either side (0 or
    μ for an empty side). No other two values have a smaller squared error, and they keep each group's sum.
    """
    if threshold == "mean":
        mean = v.mean(1, keepdim=True)
        above = v - mean
        bits = greater_equal(above, 0)
        ones, excess = bits.view(torch.uint8).sum(1, dtype=torch.int32), above.clamp_(min=0).sum(1)  # = what is below
        zeros, mean = (
            (v.shape[1] - ones).clamp(min=1),
            mean.squeeze(1),
        )  # the excess above μ equals the deficit below
        return bits, torch.stack([mean - excess / zeros, mean + excess / ones.clamp(min=1)], 1)
    bits = greater_equal(v, 0)
    ones = bits.view(torch.uint8).sum(1, dtype=torch.int32)
    sum_of_ones, sum_of_zeros = v.clamp(min=0).sum(1), v.clamp(max=0).sum(1)
    return bits, torch.stack([sum_of_zeros / (v.shape[1] - ones).clamp(min=1), sum_of_ones / ones.clamp(min=1)], 1)


def dequantise(bits: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
    """low + bit · (high - low), for bits (fp32 [groups, size], 0 or 1; overwritten) and `pair` (fp32 [groups, 2]).

    Rounding may change the last bit of `high`, identically on every rank. torch.where takes ten times as long on a CPU.
    """
    low, high = pair[:, :1], pair[:, 1:]
    return bits.mul_(high - low).add_(low)


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
        remembers="a residual",
        pick="every element should move at every step",
        source="Seide et al., Interspeech 2014",
    )
    default_warmup_steps: ClassVar[int] = DENSE_START

    batched: ClassVar[bool] = True
    _row: ClassVar[int] = 0
    """Elements of a row in a tensor whose groups are not whole parts of a row, else 0. `for_tensor` sets it."""

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

    def compresses(self, name: str, shape: tuple[int, ...]) -> bool:
        """True if the base class compresses it and its columns are long enough to save bytes."""
        return super().compresses(name, shape) and (self.groups != "column" or row_size(shape) > 2)

    def for_tensor(self, name: str, shape: tuple[int, ...]) -> OneBit:
        """Returns the codec with this tensor's group size."""
        n, row = math.prod(shape), row_size(shape)
        size = min({"block": self.group_size, "column": row, "tensor": n}[self.groups], n)
        codec: Any = replace(self, groups="block", group_size=size)
        if row < n and row % size:
            codec._row = row
        return codec

    @property
    def chunk(self) -> int | None:
        """Whole groups and whole bytes."""
        return None if self._row else math.lcm(self.group_size, 8)

    def encode(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The two means of each group, the bits of all elements, and if needed a bit per row, set if it isn't all 0."""
        means, packed, v = [], [], x.view(-1)
        for start, stop in chunks(0, len(v), v.device, multiple=math.lcm(self.group_size, 8)):
            full = stop - (stop - start) % self.group_size
            ends = [(a, b) for a, b in ((start, full), (full, stop)) if a < b]
            groups = [v[a:b].view(-1, min(self.group_size, b - a)) for a, b in ends]
            bits, pairs = zip(*(quantise(group, self.threshold) for group in groups), strict=True)
            means += pairs
            packed.append(pack_bits(bits[0] if len(bits) == 1 else torch.cat([part.view(-1) for part in bits])))
        parts = [torch.cat(means), torch.cat(packed)]
        if self._row:
            parts.append(pack_bits(v.view(-1, self._row).any(1)))
        return [part.unflatten(0, (len(x), -1)) for part in parts] if x.dim() > 1 else parts

    def decode(self, parts: Sequence[torch.Tensor], n: int) -> torch.Tensor:
        """The mean that each element's bit selects; 0 in a row of zeros."""
        means, packed, *rows = parts
        if packed.dim() > 1:  # several tensors, each of whole groups and bytes
            return self.decode([means.flatten(0, 1), packed.flatten()], len(packed) * n).view(-1, n)
        bits, full = look_up(bit_table(packed.device), packed)[:n], n - n % self.group_size
        dequantise(bits[:full].view(-1, self.group_size), means[: full // self.group_size])
        if full < n:
            dequantise(bits[full:].view(1, -1), means[-1:])
        for any_in_row in rows:
            bits.view(-1, self._row).mul_(unpack_bits(any_in_row, n // self._row).unsqueeze(1))
        return bits
