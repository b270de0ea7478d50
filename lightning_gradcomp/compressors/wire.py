"""Indices and values as bytes: what travels, and exactly how long it is.

A set of k sorted indices below n is written in Elias-Fano form (Elias 1974, Fano 1971): the low l = floor(log2(n/k))
bits of each as they are (all lowest first), the high parts as one bitmap in which the i-th index sets bit
(index >> l) + i. It costs about l + 2 bits an index, within 6 % of the entropy at the densities used here, and its
length depends on n and k alone, so every rank's message has the same size and no sizes are exchanged.
"""

from __future__ import annotations

import numpy as np

from lightning_gradcomp.compressors.sent import Sparse
from lightning_gradcomp.compressors.values import pack_values, unpack_values, value_bytes
from lightning_gradcomp.lazy import torch


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
    """uint8 tensor of `index_bytes(n, k)` bytes from k ascending, distinct int64 indices below n."""
    k = indices.numel()
    low = low_bits(n, k)
    shifts = torch.arange(low, dtype=torch.int32, device=indices.device).unsqueeze(1)
    low_part = ((indices & (2**low - 1)).int() >> shifts) & 1  # [low, k]: all lowest bits, then all second ones, ...
    high_part = torch.zeros(k + (n >> low) + 1, dtype=torch.uint8, device=indices.device)
    high_part[(indices >> low) + torch.arange(k, device=indices.device)] = 1
    return torch.cat([pack_bits(low_part.reshape(-1).to(torch.uint8)), pack_bits(high_part)])


def unpack_indices(packed: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The k ascending int64 indices that `pack_indices` wrote."""
    low = low_bits(n, k)
    low_length = (k * low + 7) // 8
    high_part = unpack_bits(packed[low_length:], k + (n >> low) + 1)
    if packed.is_cuda:  # told how many there are, it needn't be waited for
        ones = torch.nonzero_static(high_part, size=k).squeeze(1)
    else:
        ones = torch.from_numpy(np.flatnonzero(high_part.numpy().view(bool)))
    high = ones - torch.arange(k, device=packed.device)
    shifts = torch.arange(low, dtype=torch.int32, device=packed.device).unsqueeze(1)
    low_part = unpack_bits(packed[:low_length], k * low).view(low, k).int()
    return (high << low) + (low_part << shifts).sum(0)


def pack_sparse(flat: torch.Tensor, indices: torch.Tensor, values: str) -> tuple[torch.Tensor, Sparse]:
    """uint8 payload of the entries of `flat` (fp32 [n]) at `indices`: values in that format, then indices.

    Returns:
        The payload, and the entries as they will be read.
    """
    packed = pack_values(flat[indices], values)
    read = Sparse(indices, unpack_values(packed, indices.numel(), values))
    return torch.cat([packed, pack_indices(indices, flat.numel())]), read


def unpack_sparse(payload: torch.Tensor, n: int, k: int, values: str) -> Sparse:
    """The k entries of a buffer of n that `pack_sparse` wrote."""
    length = value_bytes(k, values)
    return Sparse(unpack_indices(payload[length:], n, k), unpack_values(payload[:length], k, values))


def sparse_bytes(n: int, k: int, values: str) -> int:
    """Length of what `pack_sparse` makes of k entries of a buffer of n."""
    return value_bytes(k, values) + index_bytes(n, k)


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """One byte from every eight of the 0/1 uint8 tensor `bits`, first bit lowest; the last byte is filled with 0."""
    if not bits.is_cuda:  # numpy's is many times faster on the CPU than torch's shifts
        return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))
    padded = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (padded << shifts).sum(1, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` bits of `packed` as a 0/1 uint8 tensor."""
    if not packed.is_cuda:
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=length, bitorder="little"))
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> shifts) & 1).view(-1)[:length]
