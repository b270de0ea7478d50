"""The payload of a sparse tensor: values in some format, then their indices (block_gaps.py)."""

from __future__ import annotations

import torch

from lightning_gradcomp.compressors.decoded import Sparse
from lightning_gradcomp.compressors.kernels.block_gaps import index_bytes, pack_indices, unpack_indices
from lightning_gradcomp.compressors.kernels.formats import pack_values, unpack_values, value_bytes


def pack_sparse(flat: torch.Tensor, indices: torch.Tensor, values: str) -> tuple[torch.Tensor, Sparse]:
    """uint8 payload of the entries of `flat` (fp32 [n]) at `indices` (int64, ascending), values in that format.

    Returns:
        The payload, and what it decodes to.
    """
    packed = pack_values(flat[indices], values)
    decoded = Sparse(indices, unpack_values(packed, indices.numel(), values))
    return torch.cat([packed, pack_indices(indices, flat.numel())]), decoded


def unpack_sparse(payload: torch.Tensor, n: int, k: int, values: str) -> Sparse:
    """The k entries of a buffer of n elements that `pack_sparse` wrote."""
    length = value_bytes(k, values)
    return Sparse(unpack_indices(payload[length:], n, k), unpack_values(payload[:length], k, values))


def sparse_bytes(n: int, k: int, values: str) -> int:
    """Length of what `pack_sparse` makes of k entries of a buffer of n."""
    return value_bytes(k, values) + index_bytes(n, k)
