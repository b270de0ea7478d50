"""Sorted indices as bytes: the code of Elias (1974) and Fano (1971).

Each index is split into its lowest bits and the rest. The lowest bits are stored as they are. The rest of the i-th
index sets bit rest + i of a bitmap. The indices ascend, so each sets a bit of its own, in their order. From a quarter
of all indices on, the bitmap of the indices themselves is shorter.

The length depends on n and k alone: every rank's message has the same size, and ranks need not exchange sizes. For
random indices this is 0.47 to 0.56 bits per index above the entropy, which is log2(n / k) + 1.44 for small k. Golomb's
code of the gaps (Golomb 1966) is within 0.03 bits, but its length depends on the indices.
"""

from __future__ import annotations

import numpy as np
import torch

from lightning_gradcomp.compressors.kernels.bits import pack_bits, unpack_bits


def lengths(n: int, k: int) -> tuple[int, int]:
    """For k indices below n: the number of lowest bits that gives the shortest encoding, and the bits of the bitmap."""
    if is_plain(n, k):
        return 0, n
    bits = min(range(31), key=lambda bits: k * bits + ((n - 1) >> bits))  # 30 bits fit into an int32
    return bits, k + ((n - 1) >> bits)


def is_plain(n: int, k: int) -> bool:
    """True if the encoding is the bitmap of the indices."""
    return 4 * k >= n


def index_bytes(n: int, k: int) -> int:
    """Bytes of k indices below n after `pack_indices`: at most log2(n / k) + 2 bits per index, and a bit per n.

    >>> index_bytes(1_000_000, 1000) * 8 / 1000  # bits per index; the entropy is 11.4
    11.96
    """
    bits, bitmap = lengths(n, k)
    return (k * bits + bitmap + 7) // 8


def pack_indices(indices: torch.Tensor, n: int) -> torch.Tensor:
    """uint8 [index_bytes(n, k)] from k ascending, distinct int64 indices below n: the lowest bits, then the bitmap.

    The lowest bit of every index comes first, then the second-lowest of every index, and so on.
    """
    k, device = indices.numel(), indices.device
    bits, length = lengths(n, k)
    low, high = (indices.int() & _powers(bits, device).unsqueeze(1)) != 0, indices >> bits
    if not is_plain(n, k):
        high += torch.arange(k, device=device)
    bitmap = torch.zeros(length, dtype=torch.bool, device=device).index_fill_(0, high, True)
    return pack_bits(torch.cat([low.view(-1), bitmap]))


def unpack_indices(packed: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The k ascending int64 indices that `pack_indices` wrote."""
    bits, length = lengths(n, k)
    low, bitmap = unpack_bits(packed, k * bits + length).split([k * bits, length])
    high = _places(bitmap.view(torch.bool), k)
    if not is_plain(n, k):
        high -= torch.arange(k, device=packed.device)
    return (high << bits) + _numbers(low.view(bits, k))


def _powers(bits: int, device: torch.device) -> torch.Tensor:
    return 1 << torch.arange(bits, dtype=torch.int32, device=device)


# On a CPU numpy takes a tenth of torch's time for these two.


def _numbers(planes: torch.Tensor) -> torch.Tensor:
    """The numbers whose lowest bits are planes[0], second-lowest bits planes[1], and so on ([bits, k]): int [k]."""
    powers = _powers(len(planes), planes.device)
    if planes.is_cuda:
        return (planes * powers.unsqueeze(1)).sum(0)
    return torch.from_numpy(np.einsum("b,bk->k", powers.numpy(), planes.numpy()))


def _places(bitmap: torch.Tensor, k: int) -> torch.Tensor:
    """Where the k bits of `bitmap` are set: int64 [k]. Without k, the host would wait for a GPU to count them."""
    if bitmap.is_cuda:
        return torch.nonzero_static(bitmap, size=k).squeeze(1)
    return torch.from_numpy(np.flatnonzero(bitmap.numpy()))
