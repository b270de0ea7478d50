"""Sorted indices as bytes (kernels/elias_fano.py): one kernel writes all bits, another reads the lowest ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_gradcomp.compressors.kernels.cuda import launch

BLOCK = 1024
"""Indices in a program."""


def pack(indices: torch.Tensor, bits: int, length: int, *, plain: bool) -> torch.Tensor:
    """The bytes of ascending indices (int64 [k]): `bits` planes of lowest bits, then a bitmap of `length` bits."""
    k = len(indices)
    nbytes = (k * bits + length + 7) // 8
    words = torch.zeros((nbytes + 3) // 4, dtype=torch.int32, device=indices.device)
    launch(_set_bits, triton.cdiv(k, BLOCK), indices, words, k, BLOCK=BLOCK, BITS=bits, PLAIN=plain)
    return words.view(torch.uint8)[:nbytes]


def unpack(low: torch.Tensor, places: torch.Tensor, bits: int, *, plain: bool) -> torch.Tensor:
    """The indices from the planes of their lowest bits (0/1 uint8 [bits · k]) and their places in the bitmap [k]."""
    indices, k = torch.empty_like(places), len(places)
    launch(_join, triton.cdiv(k, BLOCK), low, places, indices, k, BLOCK=BLOCK, BITS=bits, PLAIN=plain)
    return indices


@triton.jit
def _set_bits(indices, words, k, BLOCK: tl.constexpr, BITS: tl.constexpr, PLAIN: tl.constexpr):
    numbers = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = numbers < k
    index = tl.load(indices + numbers, mask=inside, other=0)
    for bit in tl.static_range(BITS):
        _set_bit(words, bit * k + numbers, inside & (((index >> bit) & 1) != 0))
    place = (index >> BITS) if PLAIN else (index >> BITS) + numbers
    _set_bit(words, BITS * k + place, inside)


@triton.jit
def _set_bit(words, places, wanted):
    one = tl.full(places.shape, 1, tl.int32)
    tl.atomic_or(words + places // 32, one << (places % 32).to(tl.int32), mask=wanted)


@triton.jit
def _join(low, places, indices, k, BLOCK: tl.constexpr, BITS: tl.constexpr, PLAIN: tl.constexpr):
    numbers = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = numbers < k
    place = tl.load(places + numbers, mask=inside, other=0)
    index = (place if PLAIN else place - numbers) << BITS
    for bit in tl.static_range(BITS):
        index += tl.load(low + bit * k + numbers, mask=inside, other=0).to(tl.int64) << bit
    tl.store(indices + numbers, index, mask=inside)
