"""Values as 2 bits with two magnitudes for each 256: the format "int2" (kernels/formats.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_gradcomp.compressors.kernels.cuda import launch

LARGEST = tl.constexpr(torch.finfo(torch.bfloat16).max)


def pack_int2(v: torch.Tensor, packed: torch.Tensor, group: int) -> None:
    """Write v (fp32 [k]) to `packed` (uint8): two magnitudes for each `group` values, then two bits for each value."""
    k, groups = v.numel(), triton.cdiv(v.numel(), group)
    launch(_pack_int2, groups, v, packed, packed[4 * groups :], k, packed.numel() - 4 * groups, GROUP=group)


def unpack_int2(packed: torch.Tensor, k: int, group: int) -> torch.Tensor:
    """The k values (fp32) that `pack_int2` wrote."""
    v, groups = torch.empty(k, dtype=torch.float32, device=packed.device), triton.cdiv(k, group)
    launch(_unpack_int2, groups, packed, packed[4 * groups :], v, k, GROUP=group)
    return v


@triton.jit
def _mean(values, chosen):
    """The mean of the chosen values, 0 without any. Divides before adding: the sum of large numbers would overflow."""
    number = tl.maximum(tl.sum(chosen.to(tl.float32)), 1.0)
    return tl.sum(tl.where(chosen, values / number, 0.0))


@triton.jit
def _bfloat16(x):
    """The bits of x, rounded to the nearest bfloat16 (ties to even), as an integer; x is finite and not negative."""
    bits = tl.minimum(x, LARGEST).to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def _store_half(to, bits):
    """Store 16 bits as two bytes, the lower first."""
    tl.store(to, (bits & 0xFF).to(tl.uint8))
    tl.store(to + 1, (bits >> 8).to(tl.uint8))


@triton.jit
def _pack_int2(v, levels, codes, k, code_bytes, GROUP: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, GROUP // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]  # four values in a byte
    inside = group * GROUP + within < k
    values = tl.load(v + group * GROUP + within, mask=inside, other=0.0)
    bits = values.to(tl.int32, bitcast=True)  # a GPU may compare denormals as 0
    zero, magnitudes = (bits & 0x7FFFFFFF) == 0, tl.abs(values)
    above = magnitudes > _mean(magnitudes, inside)
    zeros = tl.sum((inside & zero).to(tl.int32))
    low = tl.where(zeros != 0, 0.0, _mean(magnitudes, inside & (above == 0)))
    _store_half(levels + 4 * group, _bfloat16(low))
    _store_half(levels + 4 * group + 2, _bfloat16(_mean(magnitudes, above)))
    negative = (bits < 0) & (zero == 0)
    pairs = (tl.where(negative, 1, 0) + tl.where(above, 2, 0)) << (2 * tl.arange(0, 4))[None, :]
    places = group * (GROUP // 4) + tl.arange(0, GROUP // 4)
    tl.store(codes + places, tl.sum(pairs, 1).to(tl.uint8), mask=places < code_bytes)


@triton.jit
def _load_half(at):
    """A bfloat16 of two bytes, as fp32."""
    bits = tl.load(at).to(tl.int32) | (tl.load(at + 1).to(tl.int32) << 8)
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _unpack_int2(levels, codes, v, k, GROUP: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    places = group * GROUP + tl.arange(0, GROUP)
    inside = places < k
    pairs = tl.load(codes + places // 4, mask=inside, other=0).to(tl.int32) >> (2 * (places % 4)).to(tl.int32)
    magnitudes = tl.where((pairs & 2) != 0, _load_half(levels + 4 * group + 2), _load_half(levels + 4 * group))
    tl.store(v + places, tl.where((pairs & 1) != 0, -magnitudes, magnitudes), mask=inside)
