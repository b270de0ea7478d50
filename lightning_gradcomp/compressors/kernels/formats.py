"""Numbers as bytes: all 32 bits, 16, 8 with a scale for each 256 values, or 2 with two magnitudes for each 256.

Lengths depend on the number of values alone. The rounding error stays in the sender's residual, which subtracts the
values that receivers decode.
"""

from __future__ import annotations

import torch

from lightning_gradcomp.compressors.kernels.bits import pack_bits, unpack_bits
from lightning_gradcomp.compressors.kernels.int8 import GROUP, int8_bytes, pack_int8, unpack_int8
from lightning_gradcomp.compressors.kernels.rows import Rows
from lightning_gradcomp.errors import refusal

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats that are torch dtypes."""
BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "int8": 8, "int2": 2}
"""Bits per value in each format, without scales and magnitudes."""


def check_format(what: str, values: str) -> None:
    """Raises ValueError unless `values` is the name of a format."""
    if values not in BITS:
        raise refusal(what, values, ", ".join(repr(name) for name in BITS))


def value_bytes(k: int, values: str) -> int:
    """Bytes of k values after `pack_values`.

    >>> [value_bytes(1000, values) for values in ("fp32", "bf16", "int8", "int2")]
    [4000, 2000, 1016, 266]
    """
    if values == "int8":
        return int8_bytes(k)
    magnitudes = 4 * -(-k // GROUP) if values == "int2" else 0
    return (BITS[values] * k + 7) // 8 + magnitudes


def pack_values(v: torch.Tensor, values: str) -> torch.Tensor:
    """uint8 [value_bytes(k, values)] from v (fp32 [k], finite). Values too large for 16 bits are clamped."""
    if not v.numel():
        return v.new_empty(0, dtype=torch.uint8)
    if values == "int8":
        return pack_int8(v, v.new_empty(int8_bytes(v.numel()), dtype=torch.uint8))
    if values == "int2":
        levels, above = two_levels(v)
        bits = torch.stack([v < 0, above], 1).view(torch.uint8)
        return torch.cat([levels.view(torch.uint8).view(-1), pack_bits(bits.view(-1))])
    dtype = DTYPES[values]
    if dtype != torch.float32:
        largest = torch.finfo(dtype).max
        v = v.clamp(-largest, largest).to(dtype)
    return v.view(torch.uint8)


def unpack_values(packed: torch.Tensor, k: int, values: str) -> torch.Tensor:
    """The k values (fp32) that `pack_values` wrote."""
    if values == "int8":
        return unpack_int8(packed, torch.empty(k, dtype=torch.float32, device=packed.device))
    if values == "int2":
        groups = -(-k // GROUP)
        levels = packed[: 4 * groups].view(torch.bfloat16).view(groups, 2).float()
        negative, above = unpack_bits(packed[4 * groups :], 2 * k).view(torch.bool).view(k, 2).unbind(1)
        low, high = levels.repeat_interleave(GROUP, 0)[:k].unbind(1)
        magnitude = torch.where(above, high, low)
        return torch.where(negative, -magnitude, magnitude)
    return packed.view(DTYPES[values]).float()


def two_levels(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two magnitudes that replace a group's values in "int2", and which values of v (fp32 [k]) get the upper one.

    A group's mean magnitude splits it in two. Each part is written as its own mean magnitude, which leaves the smallest
    squared error. Signs are exact, and so is a group's sum of magnitudes but for rounding of the two means. In a group
    that holds a 0, the lower magnitude is 0: a 0 stays exactly 0, and the small values stay in the residual.

    Returns:
        bfloat16 [groups, 2], the lower and upper magnitude, 0 for an empty part. bool [k], True for the upper one.
    """
    grouped, sizes = _groups(v.abs()), Rows.cut(v.numel(), GROUP).sizes(v.device)
    if isinstance(sizes, torch.Tensor):  # the last group is shorter
        sizes = sizes.unsqueeze(1)
    # Divide before adding: the sum of large numbers would overflow.
    mean = (grouped / sizes).sum(1, keepdim=True)
    above = grouped > mean
    sides = torch.stack([~above, above], 1)  # [groups, 2, GROUP]; padding is below, and adds 0
    many = above.sum(1, keepdim=True)
    many = torch.cat([sizes - many, many], 1).clamp_(min=1)
    levels = (grouped.unsqueeze(1) / many.unsqueeze(2)).mul_(sides).sum(2)
    levels[:, :1].masked_fill_((grouped > 0).sum(1, keepdim=True) < sizes, 0)
    largest = torch.finfo(torch.bfloat16).max
    return levels.clamp_(max=largest).to(torch.bfloat16), above.view(-1)[: v.numel()]


def _groups(v: torch.Tensor) -> torch.Tensor:
    """v as [groups, GROUP]; the last group is padded with zeros."""
    return torch.nn.functional.pad(v, (0, -v.numel() % GROUP)).view(-1, GROUP)
