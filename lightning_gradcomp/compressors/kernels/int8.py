"""Numbers as 8-bit integers with an fp32 scale for each 256: 1.016 bytes a number.

A group's largest magnitude becomes 127; the others are rounded to a multiple of a 127th of it. Rounding is to the
nearest, or stochastic: up or down at random, so that the expectation is exact. A NaN or an infinity makes its whole
group NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lightning_gradcomp.compressors.kernels.rng import fill_uniform
from lightning_gradcomp.compressors.kernels.rows import places

GROUP = 256
"""Number of values that share a scale."""
LIMITS = torch.finfo(torch.float32)
CHUNK = 1 << 17
"""Number of values that a CPU handles at a time. Intermediate results then stay in its cache: three times faster."""


def int8_bytes(k: int) -> int:
    """Bytes of k values after `pack_int8`.

    >>> int8_bytes(1000)
    1016
    """
    return 4 * -(-k // GROUP) + k


def pack_int8(v: torch.Tensor, out: torch.Tensor, seeds: torch.Tensor | None = None) -> torch.Tensor:
    """Fill `out`, uint8 [int8_bytes(k)], with the scales and integers of v, fp32 [k], both contiguous. Returns it.

    With leading dimensions, the same in both, rows are contiguous and k is a multiple of 256. So it is with `seeds`
    for stochastic rounding, the groups' `row_seeds`: int32 [..., g].
    """
    for place, values, scales, integers in _groups(v, out):
        work = values.abs()
        largest = work.amax(-1, keepdim=True)
        # Slightly below the largest number: dividing by 127 may round up, and 127 times the result would overflow.
        # Not below the smallest number of full precision: 127 times the scale is the largest magnitude, or more.
        finite = (largest.clamp(max=0.999 * LIMITS.max) / 127).clamp(min=LIMITS.tiny)
        scales.copy_(torch.where(largest.isinf(), largest, finite))
        if seeds is None:
            torch.div(values, scales, out=work).round_()
        else:
            # A quotient of 127 but for rounding errors stays below 128.
            fill_uniform(work, seeds[place]).addcdiv_(values, scales).floor_()
        integers.copy_(work)
    return out


def unpack_int8(packed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Fill `out`, fp32 [k], contiguous, with the values that `pack_int8` wrote. Returns it."""
    for _, values, scales, integers in _groups(out, packed):
        torch.mul(integers, scales, out=values)
    return out


def add_int8(packed: torch.Tensor, total: torch.Tensor) -> None:
    """Add the values that `pack_int8` wrote to `total`, fp32 [..., k]. Rows are contiguous."""
    for _, values, scales, integers in _groups(total, packed):
        values += integers * scales


def _groups(v: torch.Tensor, packed: torch.Tensor) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Views of some groups at a time: all of them on a GPU, some of a row on a CPU.

    The last group of a single row may have fewer than GROUP values. It then comes alone.

    Yields:
        The place of the g groups; values [..., g, GROUP] in `v`; scales [..., g, 1] and integers in `packed`.
    """
    k = v.size(-1)
    start, whole = 4 * -(-k // GROUP), k // GROUP * GROUP
    scales = packed[..., :start].view(torch.float32).unsqueeze(-1)
    values, integers = (
        each[..., :whole].unflatten(-1, (-1, GROUP)) for each in (v, packed[..., start:].view(torch.int8))
    )
    scales_of_whole = scales[..., : whole // GROUP, :]
    for place in places(values, CHUNK // GROUP):
        yield place, values[place], scales_of_whole[place], integers[place]
    if whole < k:
        yield slice(-1, None), v[whole:].view(1, -1), scales[-1:], packed[start + whole :].view(torch.int8).view(1, -1)
