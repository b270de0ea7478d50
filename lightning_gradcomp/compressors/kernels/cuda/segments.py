"""Segments of a flat buffer, and the blocks in which kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

BLOCK = 4096
"""Elements that a program reads at a time. A block never spans two segments."""


@dataclass(frozen=True)
class Blocks:
    """The blocks of consecutive segments.

    Args:
        count: number of blocks.
        table: the start of each block, the end of its segment and the number of its segment: int64 [count, 3].
        first: the number of each segment's first block, int64 [segments].
    """

    count: int
    table: torch.Tensor
    first: torch.Tensor


@cache
def blocks_of(bounds: tuple[tuple[int, int], ...], device: torch.device) -> Blocks:
    """The blocks of the segments with these (start, stop), cached."""
    rows = [(begin, stop, number) for number, (start, stop) in enumerate(bounds) for begin in range(start, stop, BLOCK)]
    first = [0]
    for start, stop in bounds[:-1]:
        first.append(first[-1] - (start - stop) // BLOCK)
    return Blocks(len(rows), on(torch.tensor(rows), device), on(torch.tensor(first), device))


def on(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of the table. A blocking copy would wait for all work queued on a GPU."""
    return table.to(device, non_blocking=True)
