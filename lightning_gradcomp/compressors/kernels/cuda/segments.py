"""Segments of a flat buffer, and the blocks in which kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Elements that a program usually reads at a time. A block never spans two segments."""

SMALL = 1024
"""Elements of a block where segments are short, or a program would need too many registers for more."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of segments.

    Args:
        count: number of blocks.
        size: elements of a block. The last block of a segment may be shorter.
        table: the start of each block, the end of its segment and the number of its segment: int64 [count, 3].
        first: the number of each segment's first block, then `count`; int64 [segments + 1].
    """

    count: int
    size: int
    table: torch.Tensor
    first: torch.Tensor


@cache
def blocks_of(bounds: tuple[tuple[int, int], ...], device: torch.device, size: int = BLOCK) -> Blocks:
    """The blocks of the segments with these (start, stop), cached."""
    starts, stops = np.array(bounds).T
    return cut(starts, stops, device, size)


def cut(starts: np.ndarray, stops: np.ndarray, device: torch.device, size: int) -> Blocks:
    """The blocks of the segments with these starts and stops, int64 [segments]. No segment is empty."""
    (begins, _), segment, _ = parts_of(starts, stops, np.full_like(starts, size))
    first = np.searchsorted(segment, np.arange(len(starts) + 1))
    table = torch.tensor(np.stack([begins, stops[segment], segment], 1))
    return Blocks(len(segment), size, on(table, device), on(torch.tensor(first), device))


def parts_of(
    starts: np.ndarray, stops: np.ndarray, sizes: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray, np.ndarray]:
    """The parts of `sizes` elements of segments; the last part of a segment may be shorter. All int64.

    Returns:
        The parts' (starts, stops), each [parts]; the number of each part's segment; each part's number in its segment.
    """
    counts = -(-(stops - starts) // sizes)
    segment = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(segment)) - (counts.cumsum() - counts)[segment]
    begins = starts[segment] + number * sizes[segment]
    return (begins, np.minimum(begins + sizes[segment], stops[segment])), segment, number


def on(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of the table. A blocking copy would wait for all work queued on a GPU."""
    return table.to(device, non_blocking=True)


@triton.jit
def block(table):
    """This program's block: its first element, the end of its segment and the number of its segment."""
    row = table + 3 * tl.program_id(0)
    return tl.load(row), tl.load(row + 1), tl.load(row + 2)


@triton.jit
def total(partials, first, SIZE: tl.constexpr):
    """The sum of the blocks' `partials` of this program's segment, always added in the same order."""
    begin, end = tl.load(first + tl.program_id(0)), tl.load(first + tl.program_id(0) + 1)
    sums = tl.zeros([SIZE], partials.dtype.element_ty)
    for start in range(begin, end, SIZE):
        places = start + tl.arange(0, SIZE)
        sums += tl.load(partials + places, mask=places < end, other=0)
    return tl.sum(sums)


@triton.jit
def deliver(out, places, inside, values, SIGN: tl.constexpr):
    """Write decoded values to `out` (SIGN 0), add them to it (1) or subtract them from it (-1)."""
    if SIGN != 0:
        values = tl.load(out + places, mask=inside) + SIGN * values
    tl.store(out + places, values, mask=inside)
