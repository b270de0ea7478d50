"""Bit packing and table look-ups. On a CPU, numpy is several times faster than torch at these."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Pack eight of `bits` (bool or 0/1 uint8, any shape) per byte, the first bit lowest: uint8 [ceil(n / 8)].

    The last byte is padded with 0.
    """
    bits = bits.reshape(-1).view(torch.uint8)
    if not bits.is_cuda:
        return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))
    return (_in_eights(bits) << _shifts(bits.device)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, n: int) -> torch.Tensor:
    """The first n bits of `packed` (uint8): uint8 [n], each 0 or 1."""
    if not packed.is_cuda:
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=n, bitorder="little"))
    return ((packed.unsqueeze(1) >> _shifts(packed.device)) & 1).view(-1)[:n]


@cache
def _shifts(device: torch.device, step: int = 1) -> torch.Tensor:
    """0 to 7, or 7 to 0 with step -1: uint8 [8]."""
    return torch.tensor([*range(8)][::step], dtype=torch.uint8).to(device, non_blocking=True)


def _in_eights(bits: torch.Tensor, bytes_at_once: int = 1) -> torch.Tensor:
    """Bits [n], padded with 0 to a multiple of `bytes_at_once` bytes, as [bytes, 8]."""
    spare = -bits.numel() % (8 * bytes_at_once)
    return (torch.nn.functional.pad(bits, (0, spare)) if spare else bits).view(-1, 8)


def padded(length: int) -> int:
    """`length` rounded up to a multiple of 4 bytes, so that fp32 after it is aligned."""
    return -(-length // 4) * 4


@cache
def zeros(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros to pad with, [n]. Do not write into them."""
    return torch.zeros(n, dtype=dtype, device=device)


def greater_equal(x: torch.Tensor, bound: torch.Tensor | float) -> torch.Tensor:
    """x ≥ bound, element by element: bool, in the shape of x (fp32)."""
    if x.is_cuda:
        return x >= bound
    return torch.from_numpy(np.greater_equal(x.numpy(), np.float32(bound)))


def look_up(table: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """The rows of `table` (fp32 [256, w]) that the bytes `packed` (uint8 [m]) index, end to end: fp32 [m · w]."""
    if packed.is_cuda:
        return torch.nn.functional.embedding(packed.int(), table).view(-1)
    rows = np.empty((packed.numel(), table.shape[1]), np.float32)
    np.take(table.numpy(), packed.numpy(), axis=0, out=rows, mode="clip")  # "clip" avoids an intermediate buffer
    return torch.from_numpy(rows).view(-1)


@cache
def bit_table(device: torch.device) -> torch.Tensor:
    """The eight bits of every byte, the lowest first: fp32 [256, 8]."""
    return (torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device) & 1).float()


@cache
def _every_second_bit() -> np.ndarray:
    """For every byte, two bytes that hold its bits, highest first, in bits 7, 5, 3 and 1: uint16 [256]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    return np.packbits(np.stack([bits, np.zeros_like(bits)], 2).reshape(256, 16), axis=1).view(np.uint16).ravel()


def interleave(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The bits of two bool tensors [n], alternating, four of each per byte, first highest: uint8 [2 · ceil(n / 8)]."""
    if first.is_cuda:
        bits = _in_eights(torch.stack([first, second], 1).view(torch.uint8).view(-1), bytes_at_once=2)
        return (bits << _shifts(first.device, -1)).sum(1, dtype=torch.uint8)
    high, low = (np.take(_every_second_bit(), np.packbits(bits.numpy())).view(np.uint8) for bits in (first, second))
    return torch.from_numpy(high | low >> 1)
