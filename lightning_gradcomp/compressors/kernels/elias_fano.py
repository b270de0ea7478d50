"""Sorted indices as bytes, in Elias-Fano form (Elias 1974, Fano 1971).

The low l = floor(log2(n/k)) bits of each of k indices below n are written as they are (all lowest bits first), the high
parts as one bitmap in which the i-th index sets bit (index >> l) + i. That is about l + 2 bits an index, within 6 % of
the entropy of a random set at the densities used here. The length depends on n and k alone, so every rank's message has
the same size and no sizes are exchanged.
"""

from __future__ import annotations

import numpy as np
import torch

from lightning_gradcomp.compressors.kernels.bits import pack_bits, unpack_bits


def low_bits(n: int, k: int) -> int:
    """l = floor(log2(n / k)), the number of bits of each index that are stored as they are."""
    return max(0, (n // k).bit_length() - 1)


def index_bytes(n: int, k: int) -> int:
    """Bytes that `pack_indices` makes of k indices below n.

    >>> index_bytes(1_000_000, 1000) * 8 / 1000  # bits an index; the entropy is 11.4
    11.96
    """
    low = low_bits(n, k)
    return (k * low + 7) // 8 + (k + (n >> low) + 8) // 8


def pack_indices(indices: torch.Tensor, n: int) -> torch.Tensor:
    """uint8 [index_bytes(n, k)] from k ascending, distinct int64 indices below n."""
    k = indices.numel()
    low = low_bits(n, k)
    shifts = torch.arange(low, dtype=torch.int32, device=indices.device).unsqueeze(1)
    low_part = ((indices & (2**low - 1)).int() >> shifts) & 1  # [low, k]: all lowest bits, then all second ones, ...
    high_part = torch.zeros(k + (n >> low) + 1, dtype=torch.uint8, device=indices.device)
    high_part[(indices >> low) + torch.arange(k, device=indices.device)] = 1
    return torch.cat([pack_bits(low_part.to(torch.uint8)), pack_bits(high_part)])


def unpack_indices(packed: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The k ascending int64 indices that `pack_indices` wrote."""
    low = low_bits(n, k)
    low_length = (k * low + 7) // 8
    high_part = unpack_bits(packed[low_length:], k + (n >> low) + 1)
    if packed.is_cuda:  # with the count given, the host does not wait for the GPU
        ones = torch.nonzero_static(high_part, size=k).squeeze(1)
    else:
        ones = torch.from_numpy(np.flatnonzero(high_part.numpy().view(bool)))
    high = ones - torch.arange(k, device=packed.device)
    shifts = torch.arange(low, dtype=torch.int32, device=packed.device).unsqueeze(1)
    low_part = unpack_bits(packed[:low_length], k * low).view(low, k).int()
    return (high << low) + (low_part << shifts).sum(0)
