"""The format of a message: uncompressed gradients, payload, and flags.

    | dense gradients [d], padded to 4 bytes | payload, uint8 [p] | flags, 1 bit each | padded to 4 bytes |

The first flag is set if this rank's gradient is not finite. Then each parameter has one, set if this rank has its
gradient. The last two are the averager's `Flags`. Layout and sparsity determine all lengths, so they are the same on
all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_gradcomp.compressors.kernels.bits import pack_bits, padded
from lightning_gradcomp.compressors.kernels.formats import pack_values, unpack_values, value_bytes


@dataclass(frozen=True)
class Frame:
    """Positions in a message: `dense` uncompressed elements in the format `values`, `payload` bytes, and `flags` flags.

    The payload starts, and the message ends, at a multiple of 4 bytes: fp32 stays aligned.
    """

    dense: int
    values: str
    payload: int
    flags: int

    @property
    def _payload_at(self) -> int:
        return padded(value_bytes(self.dense, self.values))

    @property
    def length(self) -> int:
        """Bytes of the message."""
        return self._payload_at + padded(self.payload + (self.flags + 7) // 8)

    def pack(self, dense: torch.Tensor, payload: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        """Return the message (uint8 [length]) made of `pack_dense`'s bytes, the payload and the bool flags."""
        packed, zeros = pack_bits(flags), payload.new_zeros(3)
        before = zeros[: self._payload_at - dense.numel()]
        after = zeros[: self.length - self._payload_at - self.payload - packed.numel()]
        return torch.cat([dense, before, payload, packed, after])

    def pack_dense(self, dense: torch.Tensor) -> torch.Tensor:
        """Return the uncompressed gradients (fp32 [dense]) as bytes."""
        return pack_values(dense, self.values)

    def read_dense(self, message: torch.Tensor) -> torch.Tensor:
        """Return the uncompressed gradients, fp32 [dense]."""
        return unpack_values(message[: value_bytes(self.dense, self.values)], self.dense, self.values)

    def read_payload(self, message: torch.Tensor) -> torch.Tensor:
        """Return the payload, uint8 [payload]."""
        return message[self._payload_at : self._payload_at + self.payload]

    def read_flags(self, message: torch.Tensor) -> torch.Tensor:
        """Return the flags as `pack_bits` has packed them."""
        start = self._payload_at + self.payload
        return message[start : start + (self.flags + 7) // 8]
