"""Exact top-k of all segments at once: a radix search for each segment's k-th largest magnitude, then compaction.

A float's magnitude orders like its bits without the sign, taken as a whole number. The search finds the bits of the
k-th largest in three digits, the highest first. For each digit, one pass counts how often each value occurs among the
elements that agree with the digits found so far. Denormals count as they are, and NaN is larger than infinity.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from lightning_gradcomp.compressors.kernels.cuda import launch
from lightning_gradcomp.compressors.kernels.cuda.segments import BLOCK, SMALL, block, blocks_of, on

DIGITS = ((20, 11), (10, 10), (0, 10))
"""(lowest bit, bits) of each digit of a magnitude's 31 bits."""


def topk_segments(flat: torch.Tensor, bounds: tuple[tuple[int, int], ...], counts: tuple[int, ...]) -> torch.Tensor:
    """Flat indices (int64, ascending) of the largest magnitudes of each segment, with the CPU's choice among ties.

    Args:
        flat: fp32 [n].
        bounds: (start, stop) of each segment, ascending.
        counts: k of each segment, from 1 to its length.
    """
    blocks, many = blocks_of(bounds, flat.device), len(bounds)
    k, begins = _counts(counts, flat.device)
    sizes = [many, *(many * 2**bits for _, bits in DIGITS)]
    found, *histograms = torch.zeros(sum(sizes), dtype=torch.int32, device=flat.device).split(sizes)
    missing, ties = k.clone(), torch.empty_like(k)  # among the elements with the bits found: how many to take; how many
    for (lowest, bits), own in zip(DIGITS, histograms, strict=True):
        launch(_count_digits, blocks.count, flat, blocks.table, found, own, BLOCK=BLOCK, LOWEST=lowest, BITS=bits)
        launch(_find_digit, many, own, found, missing, ties, BITS=bits)
    blocks = blocks_of(bounds, flat.device, SMALL)
    before = torch.empty(2, blocks.count, dtype=torch.int32, device=flat.device)
    launch(_count_chosen, blocks.count, flat, blocks.table, found, before, blocks.count, BLOCK=SMALL)
    before = before.cumsum(1, dtype=torch.int32)
    indices = torch.empty(sum(counts), dtype=torch.int64, device=flat.device)
    arguments = flat, blocks.table, blocks.first, found, missing, ties, before, blocks.count, begins, indices
    launch(_write_chosen, blocks.count, *arguments, BLOCK=SMALL)
    return indices


@cache
def _counts(counts: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The counts (int32) and the number of indices before each segment's (int64), [segments]."""
    k = torch.tensor(counts)
    return on(k.int(), device), on(k.cumsum(0) - k, device)


@triton.jit
def _magnitudes(flat, start, stop, BLOCK: tl.constexpr):
    """The bits of a block's magnitudes, the places of the elements, and True for those in the segment."""
    places = start + tl.arange(0, BLOCK)
    inside = places < stop
    values = tl.load(flat + places, mask=inside, other=0.0)
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, places, inside


@triton.jit
def _count_digits(flat, table, found, histograms, BLOCK: tl.constexpr, LOWEST: tl.constexpr, BITS: tl.constexpr):
    """Add the number of occurrences of each digit in a block to its segment's histogram."""
    start, stop, segment = block(table)
    magnitudes, _, inside = _magnitudes(flat, start, stop, BLOCK)
    agrees = inside & (magnitudes >> (LOWEST + BITS) == tl.load(found + segment))
    SIZE: tl.constexpr = 2**BITS
    counts = tl.histogram((magnitudes >> LOWEST) & (SIZE - 1), SIZE, mask=agrees)
    tl.atomic_add(histograms + segment * SIZE + tl.arange(0, SIZE), counts, mask=counts > 0)


@triton.jit
def _find_digit(histograms, found, missing, ties, BITS: tl.constexpr):
    """Append to a segment's `found` the largest digit with `missing` elements or more at or above it."""
    segment = tl.program_id(0)
    SIZE: tl.constexpr = 2**BITS
    digits = tl.arange(0, SIZE)
    counts = tl.load(histograms + segment * SIZE + digits)
    above = tl.sum(counts) - tl.cumsum(counts)  # elements with a larger digit
    wanted = tl.load(missing + segment)
    digit = tl.max(tl.where(above + counts >= wanted, digits, 0))
    chosen = digits == digit
    tl.store(found + segment, (tl.load(found + segment) << BITS) | digit)
    tl.store(missing + segment, wanted - tl.sum(tl.where(chosen, above, 0)))
    tl.store(ties + segment, tl.sum(tl.where(chosen, counts, 0)))


@triton.jit
def _count_chosen(flat, table, found, numbers, blocks, BLOCK: tl.constexpr):
    """The number of a block's elements above the threshold, and of those equal to it."""
    start, stop, segment = block(table)
    magnitudes, _, inside = _magnitudes(flat, start, stop, BLOCK)
    threshold = tl.load(found + segment)
    tl.store(numbers + tl.program_id(0), tl.sum((inside & (magnitudes > threshold)).to(tl.int32)))
    tl.store(numbers + blocks + tl.program_id(0), tl.sum((inside & (magnitudes == threshold)).to(tl.int32)))


@triton.jit
def _before(chosen, numbers, first):
    """How many of a segment's chosen elements come before a block.

    Args:
        chosen: 1 for the block's chosen elements, otherwise 0.
        numbers: how many are chosen in each block and all blocks before it.
        first: the segment's first block.
    """
    outside = tl.load(numbers + first - 1, mask=first > 0, other=0)
    return tl.load(numbers + tl.program_id(0)) - tl.sum(chosen) - outside


@triton.jit
def _write_chosen(flat, table, first, found, missing, ties, numbers, blocks, begins, indices, BLOCK: tl.constexpr):
    """Write the places of a block's elements above the threshold, and of `missing` ties at even distances."""
    start, stop, segment = block(table)
    magnitudes, places, inside = _magnitudes(flat, start, stop, BLOCK)
    threshold, first_block = tl.load(found + segment), tl.load(first + segment)
    wanted, all_ties = tl.load(missing + segment).to(tl.int64), tl.load(ties + segment).to(tl.int64)
    above = (inside & (magnitudes > threshold)).to(tl.int32)
    tie = (inside & (magnitudes == threshold)).to(tl.int32)
    begin = tl.load(begins + segment) + _before(above, numbers, first_block) + tl.cumsum(above) - above
    rank = _before(tie, numbers + blocks, first_block).to(tl.int64)
    chosen = above != 0
    place = begin + (rank * wanted + all_ties - 1) // all_ties  # plus the chosen ties before the block
    if tl.sum(tie) != 0:  # few blocks have one, and dividing 64 bits takes long
        ranks = rank + tl.cumsum(tie) - tie
        taken = (ranks * wanted + all_ties - 1) // all_ties  # chosen ties before each element
        chosen |= (tie != 0) & (taken < wanted) & (taken * all_ties // wanted == ranks)
        place = begin + taken
    tl.store(indices + place, places, mask=chosen)
