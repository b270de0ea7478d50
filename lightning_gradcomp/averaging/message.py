"""A step's one message: uncompressed gradients, the payload, and what every rank must know of every other.

    | dense gradients, fp32 [d] | payload, uint8 [p] | flags, 1 bit each | 0-3 bytes of padding |

The first flag says that this rank's gradient is finite; the others, one a parameter, that it has something to add to
it. Lengths follow from the layout and the density, so they are the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_gradcomp.compressors.wire import pack_bits, unpack_bits


@dataclass(frozen=True)
class Message:
    """The shape of a step's message: `dense` fp32 elements, `payload` bytes, `flags` bits."""

    dense: int
    payload: int
    flags: int

    @property
    def num_bytes(self) -> int:
        """Length of the message, a multiple of 4 so that each rank's fp32 part is aligned after a gather."""
        return -(-(4 * self.dense + self.payload + (self.flags + 7) // 8) // 4) * 4

    def pack(self, dense: torch.Tensor, payload: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        """uint8 [num_bytes] from fp32 [dense], uint8 [payload], bool [flags]."""
        parts = torch.cat([dense.view(torch.uint8), payload, pack_bits(flags.to(torch.uint8))])
        return torch.nn.functional.pad(parts, (0, self.num_bytes - parts.numel()))

    def unpack(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dense, payload, flags) of one rank's message."""
        split = 4 * self.dense, 4 * self.dense + self.payload
        flags = unpack_bits(message[split[1] :], self.flags).bool()
        return message[: split[0]].view(torch.float32), message[split[0] : split[1]], flags
