"""The base of sparsifiers. The method selects the entries to send; this class packs their values and indices."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lightning_gradcomp.compressors.base import Codec
from lightning_gradcomp.compressors.decoded import Sparse
from lightning_gradcomp.compressors.kernels.elias_fano import index_bytes, pack_indices, unpack_indices
from lightning_gradcomp.compressors.kernels.formats import pack_values, unpack_values, value_bytes
from lightning_gradcomp.compressors.layout import Layout

if TYPE_CHECKING:
    from typing import Self


class SparseCodec(Codec):
    """A compressor that sends some entries of the flat buffer; `count` and `select` define which.

    A payload holds their values in the format `values`, then their indices (kernels/elias_fano.py).

    Args:
        values: format of the values sent: `"fp32"`, `"bf16"`, `"fp16"`, `"int8"` (with a scale for each 256 values)
            or `"int2"` (a sign and one of two magnitudes for each 256 values). The rounding error stays in the
            residual.
    """

    values: str
    sparsity: Any
    """Fraction of the entries that stays unsent, in [0, 1)."""

    def with_sparsity(self, sparsity: float | None) -> Self:
        return self if sparsity == self.sparsity else replace(self, sparsity=sparsity)

    @abstractmethod
    def count(self, layout: Layout) -> int:
        """The number k of entries to send."""

    @abstractmethod
    def select(self, flat: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The indices of the entries to send: int64 [k], ascending."""

    def payload_bytes(self, layout: Layout) -> int:
        k = self.count(layout)
        return value_bytes(k, self.values) + index_bytes(layout.n, k)

    def pack(self, flat: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Sparse]:
        indices = self.select(flat, layout)
        packed = pack_values(flat[indices], self.values)
        decoded = Sparse(indices, unpack_values(packed, indices.numel(), self.values))
        return torch.cat([packed, pack_indices(indices, flat.numel())]), decoded

    def unpack(self, payload: torch.Tensor, layout: Layout) -> Sparse:
        k = self.count(layout)
        length = value_bytes(k, self.values)
        values = unpack_values(payload[:length], k, self.values)
        return Sparse(unpack_indices(payload[length:], layout.n, k), values)
