"""2-bit codes of all tensors at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lightning_gradcomp.compressors.kernels.cuda import launch
from lightning_gradcomp.compressors.kernels.cuda.segments import SMALL, Blocks, block, blocks_of, deliver, on
from lightning_gradcomp.compressors.kernels.cuda.statistics import magnitudes, squares


@dataclass(frozen=True)
class Tables:
    """What the kernels read about a layout.

    Args:
        words: length of the payload in words of 4 bytes.
        blocks: the blocks of tensors.
        sizes: elements of each tensor, int64 [tensors].
        tensors: each tensor's start, and where its threshold and its codes are in the payload, in words:
            int64 [tensors, 3].
        thresholds: where the thresholds are in the payload, int64 [tensors].
    """

    words: int
    blocks: Blocks
    sizes: torch.Tensor
    tensors: torch.Tensor
    thresholds: torch.Tensor


def tables_of(places: Sequence[tuple[int, int, int, int]], words: int, device: torch.device) -> Tables:
    """The tables of tensors with these (start, stop, place of the threshold, place of the codes)."""
    starts, stops, thresholds, codes = torch.tensor(places).unbind(1)
    blocks = blocks_of(tuple((place[0], place[1]) for place in places), device, SMALL)
    tensors = torch.stack([starts, thresholds, codes], 1)
    return Tables(words, blocks, on(stops - starts, device), on(tensors, device), on(thresholds, device))


def best_thresholds(flat: torch.Tensor, tables: Tables) -> torch.Tensor:
    """`best_threshold` (compressors/twobit.py) of each tensor of `flat` (fp32 [n]): fp32 [tensors]."""
    tiny = torch.finfo(torch.float32).tiny
    means = magnitudes(flat, tables.blocks).div_(tables.sizes).clamp_(min=tiny)
    return squares(flat, tables.blocks, means).div_(tables.sizes).mul_(means.mul_(0.5**0.5)).clamp_(min=tiny)


def pack(tables: Tables, threshold: float | None, flat: torch.Tensor) -> torch.Tensor:
    """The payload of `flat` (fp32 [n]) at this threshold, or at each tensor's best: uint8."""
    payload, blocks = flat.new_empty(tables.words), tables.blocks
    if threshold is None:
        payload.index_copy_(0, tables.thresholds, best_thresholds(flat, tables))
    else:
        payload.index_fill_(0, tables.thresholds, threshold)
    arguments = flat, blocks.table, tables.tensors, payload, payload.view(torch.int32)
    launch(_write_codes, blocks.count, *arguments, WORDS=blocks.size // 16)
    return payload.view(torch.uint8)


def unpack(tables: Tables, payload: torch.Tensor, out: torch.Tensor, sign: int) -> None:
    """Decode a payload (uint8) into `out` (fp32 [n]), as `deliver` does."""
    blocks = tables.blocks
    arguments = payload.view(torch.float32), payload.view(torch.int32), blocks.table, tables.tensors, out
    launch(_decode, blocks.count, *arguments, SIGN=sign, WORDS=blocks.size // 16)


@triton.jit
def _codes(table, tensors, WORDS: tl.constexpr):
    """A block's elements, 16 in a row, and the shifts of their codes in a word; its words; where its threshold is."""
    begin, stop, tensor = block(table)
    entry = tensors + 3 * tensor
    start, threshold_at, codes_at = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    word, code = tl.arange(0, WORDS), tl.arange(0, 16)
    places = begin + 16 * word[:, None] + code[None, :]
    shifts = 8 * (code // 4) + 6 - 2 * (code % 4)  # the first of four is in a byte's top bits
    words = codes_at + (begin - start) // 16 + word
    return places, places < stop, shifts[None, :], words, begin + 16 * word < stop, threshold_at


@triton.jit
def _write_codes(flat, table, tensors, thresholds, payload, WORDS: tl.constexpr):
    """Write a block's codes: 11 at or above the threshold, 10 at or below its negative, 00 between."""
    places, inside, shifts, words, written, threshold_at = _codes(table, tensors, WORDS)
    values, threshold = tl.load(flat + places, mask=inside, other=0.0), tl.load(thresholds + threshold_at)
    sent, positive = inside & (tl.abs(values) >= threshold), inside & (values >= threshold)
    codes = 2 * sent.to(tl.int32) + positive.to(tl.int32)
    tl.store(payload + words, tl.sum(codes << shifts, 1), mask=written)


@triton.jit
def _decode(thresholds, payload, table, tensors, out, SIGN: tl.constexpr, WORDS: tl.constexpr):
    """Deliver -t, 0 or t for each code of a block."""
    places, inside, shifts, words, written, threshold_at = _codes(table, tensors, WORDS)
    codes = tl.load(payload + words, mask=written, other=0)[:, None] >> shifts
    signs = ((codes >> 1) & 1) * (2 * (codes & 1) - 1)  # 01 is never sent
    deliver(out, places, inside, signs.to(tl.float32) * tl.load(thresholds + threshold_at), SIGN)
