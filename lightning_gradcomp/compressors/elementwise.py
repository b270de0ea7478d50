"""Passes over many elements that numpy does several times faster than torch on a CPU, and torch does on a GPU."""

from __future__ import annotations

from functools import cache

import numpy as np

from lightning_gradcomp.lazy import torch


def at_least(x: torch.Tensor, bound: torch.Tensor | float) -> torch.Tensor:
    """x ≥ bound, element by element: bool, as long as `x` (fp32)."""
    if x.is_cuda:
        return x >= bound
    return torch.from_numpy(np.greater_equal(x.numpy(), np.float32(bound)))


def look_up(table: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """The rows of `table` (fp32 [256, w]) that the bytes `packed` (uint8 [m]) name, end to end: fp32 [m · w]."""
    if packed.is_cuda:
        return torch.nn.functional.embedding(packed.int(), table).view(-1)
    rows = np.empty((packed.numel(), table.shape[1]), np.float32)
    np.take(table.numpy(), packed.numpy(), axis=0, out=rows, mode="clip")  # "clip": no buffer in between
    return torch.from_numpy(rows).view(-1)


@cache
def _spread() -> np.ndarray:
    """For every byte, two whose bits 7, 5, 3 and 1 are its own in turn, the highest first: uint16 [256]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    return np.packbits(np.stack([bits, np.zeros_like(bits)], 2).reshape(256, 16), axis=1).view(np.uint16).ravel()


def interleave(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The bits of two bool tensors [n] in turn, four of each in a byte, the first highest: uint8 [2 · ceil(n / 8)]."""
    if first.is_cuda:
        bits = torch.nn.functional.pad(torch.stack([first, second], 1).view(-1), (0, -2 * len(first) % 16)).view(-1, 8)
        return (bits.byte() << torch.arange(7, -1, -1, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)
    high, low = (np.take(_spread(), np.packbits(bits.numpy())).view(np.uint8) for bits in (first, second))
    return torch.from_numpy(high | low >> 1)
