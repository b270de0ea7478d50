"""Payloads: flat buffers as bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from lightning_gradcomp.compressors.decoded import EMPTY, Decoded, Dense
from lightning_gradcomp.compressors.kernels.formats import pack_values, unpack_values, value_bytes
from lightning_gradcomp.compressors.layout import Layout


class Payloads(ABC):
    """Writes and reads payloads: the bytes of a flat buffer, which any rank can decode on its own."""

    tensor_by_tensor: ClassVar[bool] = False
    """True if concatenating the payloads of consecutive tensors gives the payload of all of them."""

    @property
    def for_means(self) -> Payloads:
        """Writes and reads the mean of several workers' payloads."""
        return self

    @abstractmethod
    def payload_bytes(self, layout: Layout) -> int:
        """Bytes of the payload that `pack` returns: a function of the layout alone, so the same on every rank."""

    @abstractmethod
    def pack(self, flat: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Decoded]:
        """The payload of a flat buffer, and what it decodes to.

        Args:
            flat: the values to send, fp32 [n], finite.
            layout: where each parameter is in `flat`. In a slice, a parameter may be only some of its rows.

        Returns:
            uint8 [payload_bytes(layout)], and the result of `unpack` for it.
        """

    @abstractmethod
    def unpack(self, payload: torch.Tensor, layout: Layout) -> Decoded:
        """The decoded payload (uint8 [payload_bytes(layout)]), bit-identical on every rank."""


@dataclass(frozen=True)
class Uncompressed(Payloads):
    """Payloads of all values in the format `values`, for uncompressed pushes and pulls of a parameter server."""

    values: str

    def payload_bytes(self, layout: Layout) -> int:
        return value_bytes(layout.n, self.values)

    def pack(self, flat: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Dense]:
        packed = pack_values(flat, self.values)
        return packed, self.unpack(packed, layout)

    def unpack(self, payload: torch.Tensor, layout: Layout) -> Dense:
        return Dense(unpack_values(payload, layout.n, self.values))


# With more owners than rows, some slices of a buffer are empty.


def pack_slice(codec: Payloads, flat: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Decoded]:
    """Like `codec.pack`, for a slice that may be empty."""
    return codec.pack(flat, layout) if layout.n else (flat.new_empty(0, dtype=torch.uint8), EMPTY)


def unpack_slice(codec: Payloads, payload: torch.Tensor, layout: Layout) -> Decoded:
    """Like `codec.unpack`, for a slice that may be empty."""
    return codec.unpack(payload, layout) if layout.n else EMPTY


def slice_bytes(codec: Payloads, layout: Layout) -> int:
    """Like `codec.payload_bytes`, for a slice that may be empty."""
    return codec.payload_bytes(layout) if layout.n else 0
