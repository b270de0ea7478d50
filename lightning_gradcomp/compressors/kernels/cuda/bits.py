"""Bits as bytes, in the CPU's order: the first bit lowest."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_gradcomp.compressors.kernels.cuda import launch

BLOCK = 1024
"""Bytes that a program reads or writes."""


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """`kernels.bits.pack_bits` for 0/1 uint8 [n]."""
    packed = bits.new_empty((bits.numel() + 7) // 8)
    launch(_pack, triton.cdiv(packed.numel(), BLOCK), bits, packed, bits.numel(), packed.numel(), BLOCK=BLOCK)
    return packed


def unpack_bits(packed: torch.Tensor, n: int) -> torch.Tensor:
    """`kernels.bits.unpack_bits`."""
    bits = packed.new_empty(n)
    launch(_unpack, triton.cdiv(n, BLOCK), packed, bits, n, BLOCK=BLOCK)
    return bits


@triton.jit
def _pack(bits, packed, n, nbytes, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    shifts = tl.arange(0, 8)
    each = places[:, None] * 8 + shifts[None, :]
    own = tl.load(bits + each, mask=each < n, other=0).to(tl.int32) << shifts[None, :]
    tl.store(packed + places, tl.sum(own, 1).to(tl.uint8), mask=places < nbytes)


@triton.jit
def _unpack(packed, bits, n, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < n
    own = tl.load(packed + places // 8, mask=inside, other=0).to(tl.int32)
    tl.store(bits + places, ((own >> (places % 8).to(tl.int32)) & 1).to(tl.uint8), mask=inside)
