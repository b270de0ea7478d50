"""Payloads: the bytes in which a flat buffer travels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from lightning_gradcomp.compressors.decoded import Decoded, Dense
from lightning_gradcomp.compressors.kernels.formats import pack_values, unpack_values, value_bytes
from lightning_gradcomp.compressors.layout import Layout


class Payloads(ABC):
    """Writes and reads payloads: the bytes of a flat buffer, which every rank can read by itself."""

    tensor_by_tensor: ClassVar[bool] = False
    """True if the payloads of some tensors and of the others, one after the other, are the payload of all."""

    @abstractmethod
    def payload_bytes(self, layout: Layout) -> int:
        """Length of what `pack` returns. It depends on the layout alone, so it is the same on every rank."""

    @abstractmethod
    def pack(self, flat: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Decoded]:
        """The payload of a flat buffer, and what it decodes to.

        Args:
            flat: what should be sent, fp32 [n], finite.
            layout: where each parameter is in it; in a slice, some rows of them.

        Returns:
            uint8 [payload_bytes(layout)], and what `unpack` makes of it.
        """

    @abstractmethod
    def unpack(self, payload: torch.Tensor, layout: Layout) -> Decoded:
        """What a payload (uint8 [payload_bytes(layout)]) decodes to, the same on every rank."""


@dataclass(frozen=True)
class Uncompressed(Payloads):
    """Payloads of all values: what a parameter server pushes or sends back whole.

    Args:
        values: their format, a `dense_values`.
    """

    values: str

    def payload_bytes(self, layout: Layout) -> int:
        return value_bytes(layout.n, self.values)

    def pack(self, flat: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Dense]:
        packed = pack_values(flat, self.values)
        return packed, self.unpack(packed, layout)

    def unpack(self, payload: torch.Tensor, layout: Layout) -> Dense:
        return Dense(unpack_values(payload, layout.n, self.values))
