"""TernGrad's scalers and digits of all tensors at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
import triton
import triton.language as tl

from lightning_gradcomp.compressors.kernels.bits import padded
from lightning_gradcomp.compressors.kernels.cuda import launch
from lightning_gradcomp.compressors.kernels.cuda.segments import SMALL, Blocks, block, blocks_of, deliver, on
from lightning_gradcomp.compressors.kernels.cuda.statistics import largest, squares

BYTES = 512
"""Bytes of five digits that a program writes."""


@dataclass(frozen=True)
class Tables:
    """What the kernels read about a layout.

    Args:
        length: length of the payload in bytes.
        blocks: the blocks of tensors.
        bytes: the blocks of `BYTES` bytes of five digits each.
        sizes: elements of each tensor, int64 [tensors].
        tensors: each tensor's start, and where its digits are in the payload: int64 [tensors, 2].
    """

    length: int
    blocks: Blocks
    bytes: Blocks
    sizes: torch.Tensor
    tensors: torch.Tensor


@cache
def tables_of(bounds: tuple[tuple[int, int], ...], device: torch.device) -> Tables:
    """The tables of tensors with these (start, stop), cached."""
    sizes = [stop - start for start, stop in bounds]
    *begins, length = accumulate((padded(-(-size // 5)) for size in sizes), initial=4 * len(sizes))
    tensors = torch.tensor([(start, begin) for (start, _), begin in zip(bounds, begins, strict=True)])
    blocks, own = blocks_of(bounds, device, SMALL), blocks_of(bounds, device, 5 * BYTES)
    return Tables(length, blocks, own, on(torch.tensor(sizes), device), on(tensors, device))


def scalers_of(flat: torch.Tensor, tables: Tables, c: float) -> torch.Tensor:
    """`scaler_of` (compressors/terngrad.py) of each tensor of `flat` (fp32 [n]): fp32 [tensors]."""
    most = largest(flat, tables.blocks)
    if c == 0:
        return most
    units = most.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.minimum(most, squares(flat, tables.blocks, units).div_(tables.sizes).sqrt_().mul_(c).mul_(units))


def pack(
    flat: torch.Tensor, draws: torch.Tensor, limits: torch.Tensor, scalers: torch.Tensor, tables: Tables
) -> torch.Tensor:
    """The payload of `flat`: uint8.

    Args:
        flat: fp32 [n].
        draws: uniform in [1, 2), fp32 [n].
        limits: the magnitude at which each tensor is clipped, fp32 [tensors].
        scalers: each tensor's s, fp32 [tensors].
        tables: of the layout.
    """
    payload, blocks = torch.zeros(tables.length, dtype=torch.uint8, device=flat.device), tables.bytes
    payload[: scalers.nbytes] = scalers.view(torch.uint8)
    arguments = flat, draws, blocks.table, tables.tensors, limits, scalers, payload
    launch(_write_digits, blocks.count, *arguments, BYTES=BYTES)
    return payload


def unpack(payload: torch.Tensor, digits: torch.Tensor, tables: Tables, out: torch.Tensor, sign: int) -> None:
    """Decode a payload (uint8) into `out` (fp32 [n]), as `deliver` does.

    Args:
        payload: uint8.
        digits: the five digits of every byte, minus 1: fp32 [243, 5].
        tables: of the layout.
        out, sign: as in `deliver`.
    """
    blocks, scalers = tables.blocks, payload[: 4 * len(tables.sizes)].view(torch.float32)
    arguments = payload, digits, blocks.table, tables.tensors, scalers, out
    launch(_decode, blocks.count, *arguments, SIGN=sign, BLOCK=blocks.size)


@triton.jit
def _write_digits(flat, draws, table, tensors, limits, scalers, payload, BYTES: tl.constexpr):
    """Write a block's digits, floor(draw + g / s), five in a byte, the first lowest; 0 beyond the tensor's end."""
    begin, stop, tensor = block(table)
    limit = tl.load(limits + tensor)
    per_s = tl.div_rn(1.0, tl.maximum(tl.load(scalers + tensor), 1.1754943508222875e-38))
    byte = tl.arange(0, BYTES)
    packed = tl.zeros([BYTES], tl.int32)
    for k in tl.static_range(5):
        places = begin + 5 * byte + (4 - k)
        inside = places < stop
        g = tl.load(flat + places, mask=inside, other=0.0)
        clipped = tl.minimum(tl.maximum(g, -limit), limit)
        digit = (tl.load(draws + places, mask=inside, other=0.0) + clipped * per_s).to(tl.int32)
        packed = 3 * packed + digit
    place = tl.load(tensors + 2 * tensor + 1) + (begin - tl.load(tensors + 2 * tensor)) // 5 + byte
    tl.store(payload + place, packed.to(tl.uint8), mask=begin + 5 * byte < stop)


@triton.jit
def _decode(payload, digits, table, tensors, scalers, out, SIGN: tl.constexpr, BLOCK: tl.constexpr):
    """Deliver the digits of a block, minus 1, times s."""
    begin, stop, tensor = block(table)
    places = begin + tl.arange(0, BLOCK)
    inside = places < stop
    element = (places - tl.load(tensors + 2 * tensor)).to(tl.int32)
    byte = tl.load(payload + tl.load(tensors + 2 * tensor + 1) + element // 5, mask=inside, other=0).to(tl.int32)
    digit = tl.load(digits + 5 * byte + element % 5, mask=inside, other=0.0)
    deliver(out, places, inside, digit * tl.load(scalers + tensor), SIGN)
