"""Sums and maxima of all segments at once. Each block's result is stored, then each segment's are combined in order.

There are no atomic additions, so the same input always gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lightning_gradcomp.compressors.kernels.cuda import launch
from lightning_gradcomp.compressors.kernels.cuda.segments import Blocks, block, total

PARTIALS = 1024
"""Results of blocks that a program reads at a time."""


def sums(flat: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Σx of each segment of `flat` (fp32 [n]): fp32 [segments]."""
    return _combined(_sum, flat, blocks)


def magnitudes(flat: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Σ|x| of each segment of `flat` (fp32 [n]): fp32 [segments]."""
    return _combined(_sum_magnitudes, flat, blocks)


def squares(flat: torch.Tensor, blocks: Blocks, units: torch.Tensor) -> torch.Tensor:
    """Σ(x / unit)² of each segment of `flat` (fp32 [n]), where `units` (fp32 [segments]) are not 0: fp32 [segments]."""
    return _combined(_sum_squares, flat, blocks, units)


def largest(flat: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """max|x| of each segment of `flat` (fp32 [n]): fp32 [segments]."""
    return _combined(_find_largest, flat, blocks, combine=_combine_largest)


def _combined(
    kernel: Any, flat: torch.Tensor, blocks: Blocks, *units: torch.Tensor, combine: Any = None
) -> torch.Tensor:
    """Run `kernel` on all blocks, and `combine` (default: add) on the results of each segment's."""
    partials, found = flat.new_empty(blocks.count), flat.new_empty(len(blocks.first) - 1)
    launch(kernel, blocks.count, flat, blocks.table, *units, partials, BLOCK=blocks.size)
    launch(combine or _combine_sums, len(found), partials, blocks.first, found, SIZE=PARTIALS)
    return found


@triton.jit
def _values(flat, table, BLOCK: tl.constexpr):
    """This program's block, 0 beyond its end; and the number of its segment."""
    start, stop, segment = block(table)
    places = start + tl.arange(0, BLOCK)
    return tl.load(flat + places, mask=places < stop, other=0.0), segment


@triton.jit
def _sum(flat, table, partials, BLOCK: tl.constexpr):
    values, _ = _values(flat, table, BLOCK)
    tl.store(partials + tl.program_id(0), tl.sum(values))


@triton.jit
def _sum_magnitudes(flat, table, partials, BLOCK: tl.constexpr):
    values, _ = _values(flat, table, BLOCK)
    tl.store(partials + tl.program_id(0), tl.sum(tl.abs(values)))


@triton.jit
def _sum_squares(flat, table, units, partials, BLOCK: tl.constexpr):
    values, segment = _values(flat, table, BLOCK)
    values = tl.div_rn(values, tl.zeros_like(values) + tl.load(units + segment))
    tl.store(partials + tl.program_id(0), tl.sum(values * values))


@triton.jit
def _find_largest(flat, table, partials, BLOCK: tl.constexpr):
    values, _ = _values(flat, table, BLOCK)
    tl.store(partials + tl.program_id(0), tl.max(tl.abs(values)))


@triton.jit
def _combine_sums(partials, first, found, SIZE: tl.constexpr):
    tl.store(found + tl.program_id(0), total(partials, first, SIZE))


@triton.jit
def _combine_largest(partials, first, found, SIZE: tl.constexpr):
    begin, end = tl.load(first + tl.program_id(0)), tl.load(first + tl.program_id(0) + 1)
    most = tl.zeros([SIZE], tl.float32)
    for start in range(begin, end, SIZE):
        places = start + tl.arange(0, SIZE)
        most = tl.maximum(most, tl.load(partials + places, mask=places < end, other=0.0))
    tl.store(found + tl.program_id(0), tl.max(most))
