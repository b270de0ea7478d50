"""A step's one message: the payload, the uncompressed gradients, and what every rank must know of every other.

    | dense gradients, fp32 [d] | payload, uint8 [p] | flags, 1 bit each | 0-3 bytes of padding |

The first flag says that this rank's gradient is finite; the others, one a parameter, that it has something to add to
it. Lengths follow from the layout and the density, so they are the same on all ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_gradcomp.averaging.meter import Stats
from lightning_gradcomp.averaging.topologies import AllGather
from lightning_gradcomp.compressors.wire import pack_bits, unpack_bits


def message_bytes(dense: int, payload: int, flags: int) -> int:
    """Length of a message, a multiple of 4 so that each rank's fp32 part is aligned after a gather."""
    return -(-(4 * dense + payload + (flags + 7) // 8) // 4) * 4


class Exchange:
    """One step's communication. `dense_mean`, `finite` and `anywhere` are there once the payload has travelled.

    Args:
        topology: how messages travel.
        dense: uncompressed gradients, fp32 [d].
        finite: whether this rank's gradient is.
        present: per parameter, whether this rank has something to add to its average.
        stats: where bytes and seconds are booked.
    """

    def __init__(
        self, topology: AllGather, dense: torch.Tensor, finite: bool, present: list[bool], stats: Stats
    ) -> None:
        self.topology, self.stats, self._dense = topology, stats, dense
        self._flags = torch.tensor([finite, *present], dtype=torch.uint8, device=dense.device)
        self.dense_mean = dense
        self.finite = finite
        """Whether every rank's gradient is finite."""
        self.anywhere = present
        """Per parameter: whether any rank has something."""

    def gather(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's payload (uint8 [p], one length) in rank order."""
        with self.stats.phase("compress"):
            parts = torch.cat([self._dense.view(torch.uint8), payload, pack_bits(self._flags)])
            length = message_bytes(self._dense.numel(), payload.numel(), self._flags.numel())
            message = torch.nn.functional.pad(parts, (0, length - parts.numel()))
        with self.stats.phase("exchange"):
            messages = self.topology.exchange(message)
        self.stats.bytes_sent += self.topology.traffic(length)
        self.stats.bytes_received += self.topology.traffic(length)
        with self.stats.phase("decompress"):
            begin = 4 * self._dense.numel()
            end = begin + payload.numel()
            self.dense_mean = torch.zeros_like(self._dense)
            for row in messages:
                self.dense_mean += row[:begin].view(torch.float32)
            self.dense_mean /= len(messages)
            flags = torch.stack([unpack_bits(row[end:], self._flags.numel()) for row in messages]).bool()
            self.finite = bool(flags[:, 0].all())
            self.anywhere = flags[:, 1:].any(0).tolist()
        return [row[begin:end] for row in messages]


def all_reduce_mean(
    topology: AllGather, flat: torch.Tensor, present: list[bool], *others: torch.Tensor
) -> tuple[list[torch.Tensor], list[bool]]:
    """Average `flat`, in place, and `others` over the ranks in one all-reduce; also tell what is present anywhere."""
    parts = [flat, *others, torch.tensor(present, dtype=flat.dtype, device=flat.device)]
    buffer = torch.cat(parts)
    if topology.world > 1:
        dist.all_reduce(buffer, group=topology.group)
    own, *means, anywhere = (buffer / topology.world).split([part.numel() for part in parts])
    flat.copy_(own)
    return means, (anywhere > 0).tolist()
