"""The ranks of a run, and what they do together. Every collective has one shape on all ranks.

A worker is who compresses, remembers and exchanges: every rank (`Ranks`), or the ranks of a node together (`Nodes`,
inside="dense").
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_gradcomp.averaging.leaving import pause_at_exit

SHORT = 262_144
"""Bytes of a message that gloo had better send by all-to-all, where every rank writes to every other at once: its
all-gather is a ring, which waits N-1 times for the link's delay, but fills the link better when messages are long."""

SHORT_SUM = 2**20
"""Bytes up to which a sum is made of one or two such messages: gloo's ring waits for the link's delay 5 to 15 times
with two to four ranks, these 2 to 5 times, for the same bytes. Longer ones had better be a ring, which copies less."""


def dense_traffic(num_bytes: int, world: int) -> int:
    """Bytes a rank sends when a ring all-reduce averages `num_bytes`: 2 (N-1)/N of them."""
    return round(2 * (world - 1) / world * num_bytes)


class Ranks:
    """The ranks of a process group, each a worker; None is a world of one, where nothing travels."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.world = group.size() if group else 1
        self.rank = group.rank() if group else 0
        if group:
            pause_at_exit()

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.world

    @property
    def worker(self) -> int:
        """The one that this rank is, or is a part of."""
        return self.rank

    @property
    def per_worker(self) -> int:
        """Ranks that make up a worker."""
        return 1

    @property
    def between(self) -> dist.ProcessGroup | None:
        """Those among whom this rank exchanges payloads."""
        return self.group

    def join(self, flat: torch.Tensor, marks: list[bool]) -> list[bool]:
        """From a rank's gradients (fp32 [n], in place) to its worker's: the mean, and which marks any rank has set."""
        return marks

    def gather(self, message: torch.Tensor) -> torch.Tensor:
        """The messages of all workers in their order, uint8 [N, L], from this one's, uint8 [L]."""
        return gather(self.group, message)

    def scatter(self, messages: list[torch.Tensor]) -> torch.Tensor:
        """What all workers sent to this one, in order, uint8 [N, L]; messages[j], uint8 [L of j], goes to worker j."""
        return scatter(self.group, messages, self.rank)

    def add(self, flat: torch.Tensor) -> torch.Tensor:
        """The sum of the workers' `flat` (fp32 [n]), which may be overwritten."""
        if self.world > 1:
            add(self.group, flat)
        return flat

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of each of the workers' `values` (fp32 [m])."""
        largest = values.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return largest

    def share(self, length: int) -> int:
        """Bytes of a message of `length` that this rank carries for its worker."""
        return length

    def gather_traffic(self, length: int) -> int:
        """Bytes that this rank sends to other workers in `gather`."""
        return (self.workers - 1) * self.share(length)

    def scatter_traffic(self, lengths: list[int], worker: int) -> int:
        """Bytes that a rank of `worker` sends to other workers in `scatter`."""
        return sum(self.share(length) for length in lengths) - self.share(lengths[worker])

    def add_traffic(self, num_bytes: int, device: torch.device) -> int:
        """Bytes that this rank sends to other workers in `add`, of fp32 on `device`."""
        share = self.share(num_bytes)
        if self.workers > 2 and in_short_messages(share, device):
            return 2 * (self.workers - 1) * 4 * -(-share // (4 * self.workers))
        return dense_traffic(share, self.workers)

    def maximum_traffic(self, num_bytes: int) -> int:
        """Bytes that this rank sends to other workers in `maximum`."""
        return dense_traffic(self.share(num_bytes), self.workers)

    def dense_traffic(self, num_bytes: int) -> int:
        """Bytes that a rank sends to other workers when a ring of all ranks averages `num_bytes`.

        A node has one neighbour in such a ring, so its ranks share what leaves it.
        """
        return dense_traffic(num_bytes, self.world) // self.per_worker


def in_short_messages(num_bytes: int, device: torch.device) -> bool:
    """Whether a sum of so many bytes is made of short messages, and not by a ring."""
    return device.type != "cuda" and num_bytes <= SHORT_SUM


def add(group: dist.ProcessGroup | None, flat: torch.Tensor) -> None:
    """flat [n] becomes the sum of all ranks' flat, bitwise the same on each."""
    if not in_short_messages(flat.nbytes, flat.device):
        dist.all_reduce(flat, group=group)
        return
    world = group.size() if group else 1
    part = -(-flat.numel() // world) if world > 2 else flat.numel()
    if world > 2:  # each rank adds up a stretch of all, and hands it on
        rows = flat.new_empty(world * part)
        padded = torch.nn.functional.pad(flat, (0, world * part - flat.numel()))
        dist.all_to_all_single(rows, padded, group=group)
        everyones = gather(group, rows.view(world, part).sum(0).view(torch.uint8))
        flat.copy_(everyones.view(-1).view(flat.dtype)[: flat.numel()])
    elif world == 2:  # as many bytes as to add up halves, in half the time
        rows = gather(group, flat.view(torch.uint8)).view(flat.dtype)
        torch.add(rows[0], rows[1], out=flat)


def gather(group: dist.ProcessGroup | None, message: torch.Tensor) -> torch.Tensor:
    """Every rank's message (uint8 [L]) in rank order, uint8 [N, L]."""
    world = group.size() if group else 1
    out = message.new_empty(world * message.numel())
    if world > 2 and message.numel() <= SHORT and not message.is_cuda:
        dist.all_to_all_single(out, message.repeat(world), group=group)
    else:
        dist.all_gather_into_tensor(out, message, group=group)
    return out.view(world, -1)


def scatter(group: dist.ProcessGroup | None, messages: list[torch.Tensor], rank: int) -> torch.Tensor:
    """What all ranks sent to `rank`, which this is, uint8 [N, L]; messages[j], uint8 [L of j], goes to rank j."""
    world, length = len(messages), messages[rank].numel()
    out = messages[0].new_empty(world * length)
    sizes = [message.numel() for message in messages]
    dist.all_to_all_single(out, torch.cat(messages), [length] * world, sizes, group=group)
    return out.view(world, length)
