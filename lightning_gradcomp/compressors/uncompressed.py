"""The payload of tensors that are not compressed: what a parameter server pushes or sends back whole."""

from __future__ import annotations

from typing import ClassVar

import torch

from lightning_gradcomp.compressors.decoded import Dense
from lightning_gradcomp.compressors.kernels.formats import pack_values, unpack_values, value_bytes
from lightning_gradcomp.compressors.layout import Layout


class Uncompressed:
    """A `PayloadCodec` that writes every value.

    Args:
        values: as what, a `dense_values`.
    """

    tensor_by_tensor: ClassVar[bool] = False

    def __init__(self, values: str) -> None:
        self._values = values

    def payload_bytes(self, layout: Layout) -> int:
        """Bytes of a payload."""
        return value_bytes(layout.n, self._values)

    def encode(self, flat: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Dense]:
        """The payload, and what it decodes to."""
        packed = pack_values(flat, self._values)
        return packed, self.decode(packed, layout)

    def decode(self, payload: torch.Tensor, layout: Layout) -> Dense:
        """All values."""
        return Dense(unpack_values(payload, layout.n, self._values))
