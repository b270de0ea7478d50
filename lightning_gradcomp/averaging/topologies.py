"""How messages travel between ranks. Every collective has one shape on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_gradcomp.averaging.leaving import pause_at_exit
from lightning_gradcomp.compressors.base import Codec, Compressor, Lossy
from lightning_gradcomp.errors import refusal


def dense_traffic(num_bytes: int, world: int) -> int:
    """Bytes a rank sends when a ring all-reduce averages `num_bytes`: 2 (N-1)/N of them."""
    return round(2 * (world - 1) / world * num_bytes)


SHORT = 262_144
"""Bytes of a message that gloo had better send by all-to-all, where every rank writes to every other at once: its
all-gather is a ring, which waits N-1 times for the link's delay, but fills the link better when messages are long."""


class AllGather:
    """Every rank's message goes to every rank: one collective a step, N-1 copies leave each rank."""

    name = "all_gather"

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.world = group.size() if group else 1
        self.rank = group.rank() if group else 0
        if group:
            pause_at_exit()

    def exchange(self, message: torch.Tensor) -> torch.Tensor:
        """The messages of all ranks in rank order, uint8 [N, L], from this rank's, uint8 [L]."""
        out = message.new_empty(self.world * message.numel())
        if self.world > 2 and message.numel() <= SHORT and not message.is_cuda:
            dist.all_to_all_single(out, message.repeat(self.world), group=self.group)
        else:
            dist.all_gather_into_tensor(out, message, group=self.group)
        return out.view(self.world, -1)

    def traffic(self, num_bytes: int) -> int:
        """Bytes that leave each rank when the messages are `num_bytes` long; as many arrive."""
        return (self.world - 1) * num_bytes


class TwoPhase(AllGather):
    """Messages go to the owners of stretches, and from them to every rank (`two_phase.py`)."""

    name = "two_phase"

    def scatter(self, messages: list[torch.Tensor]) -> torch.Tensor:
        """What all ranks sent to this one, in rank order, uint8 [N, L]; messages[j], uint8 [L of j], goes to rank j."""
        length = messages[self.rank].numel()
        out = messages[0].new_empty(self.world * length)
        sizes = [message.numel() for message in messages]
        dist.all_to_all_single(out, torch.cat(messages), [length] * self.world, sizes, group=self.group)
        return out.view(self.world, length)


class Server(TwoPhase):
    """As a parameter server with its keys on all ranks: compressed push to the owners, dense pull from them."""

    name = "server"


def topology(name: str, group: dist.ProcessGroup | None, compressor: Compressor) -> AllGather:
    """The topology `name` on `group`; None is a world of one, where nothing travels.

    Raises:
        ValueError: a name that is not known, or that says nothing about how this compressor's messages travel.
    """
    if name not in TOPOLOGIES:
        raise refusal("topology", name, ", ".join(repr(known) for known in TOPOLOGIES))
    cls = TOPOLOGIES[name]
    if issubclass(cls, TwoPhase) and isinstance(compressor, Lossy) and not isinstance(compressor, Codec):
        why = "'auto' or 'all_gather': an owner can't decode a part of its message"
        raise refusal(f"topology with {type(compressor).__name__}", name, why)
    return cls(group)


TOPOLOGIES: dict[str, type[AllGather]] = {
    "auto": AllGather,
    "all_gather": AllGather,
    "two_phase": TwoPhase,
    "server": Server,
}
"""By name; "auto" is also asked whether to compress at all (`trial.py`)."""
