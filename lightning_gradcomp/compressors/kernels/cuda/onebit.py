"""1-bit codes of all tensors at once: the groups' means, the bits, and the bits of rows of zeros."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from lightning_gradcomp.compressors.kernels.cuda import launch
from lightning_gradcomp.compressors.kernels.cuda.segments import (
    SMALL,
    Blocks,
    block,
    blocks_of,
    cut,
    deliver,
    on,
    parts_of,
    total,
)
from lightning_gradcomp.compressors.kernels.cuda.statistics import PARTIALS, sums


class Place(NamedTuple):
    """A tensor of a flat buffer, and where its parts are in the payload, in words of 4 bytes.

    Args:
        start, stop: its elements in the flat buffer.
        size: elements of a group. The last group may be shorter.
        pairs: the two values of each group.
        bits: the bits of all elements.
        row: elements of a row, 0 if rows have no bits.
        rows: the bits of rows.
    """

    start: int
    stop: int
    size: int
    pairs: int
    bits: int
    row: int
    rows: int


@dataclass(frozen=True)
class Tables:
    """What the kernels read about a layout.

    Args:
        words: length of the payload in words.
        blocks: the blocks of tensors.
        tensors: each tensor's `Place` without `stop`, and the number of its first group: int64 [tensors, 7].
        groups: the blocks of groups.
        sizes: elements of each group, int64 [groups].
        pairs: where the two values of each group are in the payload, int64 [groups].
        rows: the blocks of rows that have a bit.
        row_bits: the place of each such row's bit in the payload, int64 [rows].
    """

    words: int
    blocks: Blocks
    tensors: torch.Tensor
    groups: Blocks
    sizes: torch.Tensor
    pairs: torch.Tensor
    rows: Blocks
    row_bits: torch.Tensor


def tables_of(places: Sequence[Place], words: int, device: torch.device) -> Tables:
    """The tables of these tensors, whose payload has this many words."""
    start, stop, size, pair, bits, row, row_bit = np.array(places).T
    groups, tensor, number = parts_of(start, stop, size)
    first = np.searchsorted(tensor, np.arange(len(places)))
    rows, row_tensor, row_number = parts_of(*(column[row > 0] for column in (start, stop, row)))
    return Tables(
        words,
        blocks_of(tuple(zip(start.tolist(), stop.tolist(), strict=True)), device, SMALL),
        on(torch.tensor(np.stack([start, size, pair, bits, row, row_bit, first], 1)), device),
        cut(*groups, device, SMALL),
        on(torch.tensor(groups[1] - groups[0]), device),
        on(torch.tensor(pair[tensor] + 2 * number), device),
        cut(*rows, device, SMALL),
        on(torch.tensor(32 * row_bit[row > 0][row_tensor] + row_number), device),
    )


def pack(tables: Tables, threshold: str, flat: torch.Tensor) -> torch.Tensor:
    """The payload of `flat` (fp32 [n]): uint8. `threshold` is as in compressors/onebit.py."""
    payload = torch.zeros(tables.words, dtype=torch.int32, device=flat.device)
    groups, mean = tables.groups, threshold == "mean"
    thresholds = sums(flat, groups).div_(tables.sizes) if mean else flat.new_zeros(len(tables.sizes))
    ones = torch.empty(groups.count, dtype=torch.int32, device=flat.device)
    above, below = flat.new_empty(2, groups.count)
    sides = ones, above, below
    launch(_sum_sides, groups.count, flat, groups.table, thresholds, *sides, BLOCK=groups.size, MEAN=mean)
    arguments = *sides, groups.first, tables.sizes, thresholds, tables.pairs, payload.view(torch.float32)
    launch(_write_pairs, len(tables.sizes), *arguments, MEAN=mean, SIZE=PARTIALS)
    blocks = tables.blocks
    launch(_write_bits, blocks.count, flat, blocks.table, tables.tensors, thresholds, payload, WORDS=blocks.size // 32)
    if (rows := tables.rows).count:
        launch(_write_rows, rows.count, flat, rows.table, tables.row_bits, payload, BLOCK=rows.size)
    return payload.view(torch.uint8)


def unpack(tables: Tables, payload: torch.Tensor, out: torch.Tensor, sign: int) -> None:
    """Decode a payload (uint8) into `out` (fp32 [n]), as `deliver` does."""
    blocks, words = tables.blocks, payload.view(torch.int32)
    arguments = words, payload.view(torch.float32), blocks.table, tables.tensors, out
    launch(_decode, blocks.count, *arguments, ROWS=tables.rows.count > 0, SIGN=sign, WORDS=blocks.size // 32)


@triton.jit
def _sum_sides(flat, table, thresholds, ones, above, below, BLOCK: tl.constexpr, MEAN: tl.constexpr):
    """For a block of a group: the number of elements at or above the threshold, and the sum of what exceeds it.

    Without MEAN also the sum of what lies below it.
    """
    start, stop, group = block(table)
    places = start + tl.arange(0, BLOCK)
    inside = places < stop
    over = tl.load(flat + places, mask=inside, other=0.0) - tl.load(thresholds + group)
    tl.store(ones + tl.program_id(0), tl.sum((inside & (over >= 0)).to(tl.int32)))
    tl.store(above + tl.program_id(0), tl.sum(tl.where(inside & (over > 0), over, 0.0)))
    if not MEAN:
        tl.store(below + tl.program_id(0), tl.sum(tl.where(inside & (over < 0), over, 0.0)))


@triton.jit
def _write_pairs(ones, above, below, first, sizes, thresholds, pairs, payload, MEAN: tl.constexpr, SIZE: tl.constexpr):
    """Write a group's two values: the means of the elements on either side of the threshold."""
    group = tl.program_id(0)
    ones, excess = total(ones, first, SIZE), total(above, first, SIZE)
    zeros = tl.load(sizes + group).to(tl.int32) - ones
    high = tl.div_rn(excess, tl.maximum(ones, 1).to(tl.float32))
    if MEAN:  # the excess above the mean equals the deficit below
        mean = tl.load(thresholds + group)
        low = mean - tl.div_rn(excess, tl.maximum(zeros, 1).to(tl.float32))
        high = mean + high
    else:
        low = tl.div_rn(total(below, first, SIZE), tl.maximum(zeros, 1).to(tl.float32))
    place = payload + tl.load(pairs + group)
    tl.store(place, low)
    tl.store(place + 1, high)


@triton.jit
def _bits(table, tensors, WORDS: tl.constexpr):
    """A block's elements, 32 in a row, and their places in their tensor; their bits' shifts and words; its entry."""
    begin, stop, tensor = block(table)
    entry = tensors + 7 * tensor
    start, bits_at = tl.load(entry), tl.load(entry + 3)
    word, bit = tl.arange(0, WORDS), tl.arange(0, 32)
    places = begin + 32 * word[:, None] + bit[None, :]
    words = bits_at + (begin - start) // 32 + word
    return places, places < stop, (places - start).to(tl.int32), bit[None, :], words, begin + 32 * word < stop, entry


@triton.jit
def _write_bits(flat, table, tensors, thresholds, payload, WORDS: tl.constexpr):
    """Write a block's bits: set if the element is at least its group's threshold."""
    places, inside, element, shifts, words, written, entry = _bits(table, tensors, WORDS)
    group = tl.load(entry + 6) + element // tl.load(entry + 1).to(tl.int32)
    threshold = tl.load(thresholds + group, mask=inside, other=0.0)
    bits = inside & (tl.load(flat + places, mask=inside, other=0.0) >= threshold)
    tl.store(payload + words, tl.sum(bits.to(tl.int32) << shifts, 1), mask=written)


@triton.jit
def _write_rows(flat, table, row_bits, payload, BLOCK: tl.constexpr):
    """Set the bit of a block's row if an element is not 0."""
    start, stop, row = block(table)
    places = start + tl.arange(0, BLOCK)
    values = tl.load(flat + places, mask=places < stop, other=0.0)
    found = tl.max((values != 0).to(tl.int32))
    place = tl.load(row_bits + row)
    tl.atomic_or(payload + place // 32, found << (place % 32).to(tl.int32))


@triton.jit
def _decode(payload, pairs, table, tensors, out, ROWS: tl.constexpr, SIGN: tl.constexpr, WORDS: tl.constexpr):
    """Deliver the value that each bit of a block selects; 0 in a row of zeros."""
    places, inside, element, shifts, words, written, entry = _bits(table, tensors, WORDS)
    bits = (tl.load(payload + words, mask=written, other=0)[:, None] >> shifts) & 1
    pair = pairs + tl.load(entry + 2) + 2 * (element // tl.load(entry + 1).to(tl.int32))
    low, high = tl.load(pair, mask=inside, other=0.0), tl.load(pair + 1, mask=inside, other=0.0)
    values = bits.to(tl.float32) * (high - low) + low
    if ROWS:
        row, rows_at = tl.load(entry + 4).to(tl.int32), tl.load(entry + 5)
        number = element // tl.maximum(row, 1)
        words = tl.load(payload + rows_at + number // 32, mask=inside & (row > 0), other=-1)
        values *= ((words >> (number % 32)) & 1).to(tl.float32)
    deliver(out, places, inside, values, SIGN)
