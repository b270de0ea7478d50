"""The workers of a run, and what they do together. Every collective has one shape on all ranks.

A worker compresses, remembers and exchanges: each rank by itself (`Ranks`), or the ranks of a node together (`Nodes`,
inside="dense").
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from lightning_gradcomp.errors import refusal

SHORT = 262_144
"""Bytes up to which a gather is an all-to-all, where every rank writes to every other at once: gloo's all-gather is a
ring, which waits N-1 times for the link's delay, but fills the link better when messages are long."""

SHORT_SUM = 2**20
"""Bytes up to which a sum is made of one or two such messages: gloo's ring waits for the link's delay 5 to 15 times
with two to four ranks, these 2 to 5 times, for the same bytes. For longer ones a ring copies less."""

EXIT_PAUSE = 0.05
"""Seconds; the interpreter switches threads after 0.005."""


@cache
def pause_at_exit() -> None:
    """From now on, wait a moment when the interpreter ends. Once a process, however often it is called.

    gloo's threads release a collective's tensors a moment after it is done, and need the interpreter's lock for that.
    If the interpreter is already shutting down then, the thread is ended inside a destructor, and the process aborts
    after a training that went well ("terminate called without an active exception", seen with torch 2.15 in about one
    of ten runs, with plain DDP too). A launcher takes that for a failure.
    """
    atexit.register(time.sleep, EXIT_PAUSE)


def dense_traffic(num_bytes: int, world: int) -> int:
    """Bytes a rank sends when a ring all-reduce averages `num_bytes`: 2 (N-1)/N of them."""
    return round(2 * (world - 1) / world * num_bytes)


class Ranks:
    """The ranks of a process group, each a worker.

    Args:
        group: None is a world of one, where nothing travels.
        world: without a group, the number of ranks whose traffic is only counted.
        shards: of a sharded model: the ranks of this replica. Together they are the worker, but each has to do with
            the ranks of `group` alone, which hold the same shard; what all of a worker must agree on is added up here.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, world: int = 1, shards: dist.ProcessGroup | None = None
    ) -> None:
        self.group, self.shards = group, shards if shards and shards.size() > 1 else None
        self.world = group.size() if group else world
        self.rank = group.rank() if group else 0
        if group:
            pause_at_exit()

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.world

    @property
    def worker(self) -> int:
        """The number of the one that this rank is, or is a part of."""
        return self.rank

    @property
    def per_worker(self) -> int:
        """Ranks that make up a worker."""
        return 1

    def average_inside(self, flats: list[torch.Tensor], flags: list[bool]) -> list[bool]:
        """From a rank's gradients (flat fp32, in place) to its worker's: the mean, and which flags any rank has set."""
        return flags

    def over_shards(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of `values` (fp32 [m]) over the ranks that share a worker's gradient: of a few numbers, not of
        gradients."""
        if self.shards:
            values = values.clone()
            dist.all_reduce(values, group=self.shards)
        return values

    def any_shard(self, flags: torch.Tensor) -> torch.Tensor:
        """Which `flags` (bool [m]) are set on any rank that has a part of a worker's gradient."""
        return self.over_shards(flags.float()) > 0 if self.shards else flags

    def start_gather(self, message: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins a `gather`. What it returns waits for the messages; called in the same order on all ranks."""
        return start_gather(self.group, message)

    def gather(self, message: torch.Tensor) -> torch.Tensor:
        """The messages of all workers in their order, uint8 [N, L], from this one's, uint8 [L]."""
        return self.start_gather(message)()

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

        A node has one neighbour in such a ring, so its ranks share the bytes that leave it.
        """
        return dense_traffic(num_bytes, self.world) // self.per_worker


def in_short_messages(num_bytes: int, device: torch.device) -> bool:
    """Whether a sum of so many bytes is made of short messages instead of a ring."""
    return device.type != "cuda" and num_bytes <= SHORT_SUM


def add(group: dist.ProcessGroup | None, flat: torch.Tensor) -> None:
    """flat [n] becomes the sum of all ranks' flat, bitwise the same on each."""
    if not flat.numel():
        return
    if not in_short_messages(flat.nbytes, flat.device):
        dist.all_reduce(flat, group=group)
        return
    world = group.size() if group else 1
    part = -(-flat.numel() // world) if world > 2 else flat.numel()
    if world > 2:  # each rank adds up a part, and sends the sum on
        rows = flat.new_empty(world * part)
        padded = torch.nn.functional.pad(flat, (0, world * part - flat.numel()))
        dist.all_to_all_single(rows, padded, group=group)
        everyones = gather(group, rows.view(world, part).sum(0).view(torch.uint8))
        flat.copy_(everyones.view(-1).view(flat.dtype)[: flat.numel()])
    elif world == 2:  # as many bytes as to add up halves, in half the time
        rows = gather(group, flat.view(torch.uint8)).view(flat.dtype)
        torch.add(rows[0], rows[1], out=flat)


def all_gather_single(
    out: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None, *, async_op: bool = False
) -> Any:
    """All ranks' `own` [m], in `out` [N · m]. torch 2.14 has renamed the collective."""
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return collective(out, own, group=group, async_op=async_op)


def start_gather(group: dist.ProcessGroup | None, message: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begins a `gather`. What it returns waits for the messages."""
    world = group.size() if group else 1
    out = message.new_empty(world * message.numel())
    if world > 2 and message.numel() <= SHORT and not message.is_cuda:
        work: Any = dist.all_to_all_single(out, message.repeat(world), group=group, async_op=True)
    else:
        work = all_gather_single(out, message, group, async_op=True)

    def wait() -> torch.Tensor:
        work.wait()
        return out.view(world, -1)

    return wait


def gather(group: dist.ProcessGroup | None, message: torch.Tensor) -> torch.Tensor:
    """Every rank's message (uint8 [L]) in rank order, uint8 [N, L]."""
    return start_gather(group, message)()


def scatter(group: dist.ProcessGroup | None, messages: list[torch.Tensor], rank: int) -> torch.Tensor:
    """What all ranks sent to `rank`, which this is, uint8 [N, L]; messages[j], uint8 [L of j], goes to rank j."""
    world, length = len(messages), messages[rank].numel()
    out = messages[0].new_empty(world * length)
    sizes = [message.numel() for message in messages]
    dist.all_to_all_single(out, torch.cat(messages), [length] * world, sizes, group=group)
    return out.view(world, length)


def subgroup(group: dist.ProcessGroup, members: list[int]) -> dist.ProcessGroup:
    """Those of a group, by their rank in it, with its timeout. Called by them alone, in one order."""
    everyone = dist.get_process_group_ranks(group)
    timeout = group._get_backend(group._device_types[0]).options._timeout
    made = dist.new_group([everyone[member] for member in members], timeout, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


class Nodes(Ranks):
    """inside="dense": the ranks of a node average their gradients first, and are one worker towards the other nodes.

    All ranks of a node then compress the same gradient in the same way, and remember the same. Each sends its part of
    the message that this makes to the other nodes, and passes on inside the node what arrives. A node so sends its
    payload once, whatever the number of its ranks.

    Args:
        group: all ranks.
        per_node: consecutive ranks that are a node.

    Raises:
        ValueError: nodes that differ in their number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup, per_node: int) -> None:
        super().__init__(group)
        if self.world % per_node:
            raise refusal("ranks with inside='dense'", self.world, f"a multiple of the {per_node} ranks of a node")
        self._per_node = per_node
        node, self._place = divmod(self.rank, per_node)
        self._inside = subgroup(group, list(range(node * per_node, (node + 1) * per_node)))
        self._across = subgroup(group, list(range(self._place, self.world, per_node)))

    @property
    def workers(self) -> int:
        return self.world // self._per_node

    @property
    def worker(self) -> int:
        return self.rank // self._per_node

    @property
    def per_worker(self) -> int:
        return self._per_node

    def average_inside(self, flats: list[torch.Tensor], flags: list[bool]) -> list[bool]:
        own = torch.tensor(flags, dtype=torch.float32).to(flats[0].device, non_blocking=True)
        for flat in flats:
            dist.all_reduce(flat, group=self._inside)
            flat.div_(self._per_node)
        dist.all_reduce(own, group=self._inside)
        return (own > 0).tolist()

    def start_gather(self, message: torch.Tensor) -> Callable[[], torch.Tensor]:
        rows = start_gather(self._across, self._part(message))
        return lambda: self._share_inside(rows(), message.numel())

    def scatter(self, messages: list[torch.Tensor]) -> torch.Tensor:
        rows = scatter(self._across, [self._part(message) for message in messages], self.worker)
        return self._share_inside(rows, messages[self.worker].numel())

    def add(self, flat: torch.Tensor) -> torch.Tensor:
        own = self._part(flat.view(torch.uint8)).view(flat.dtype)
        add(self._across, own)
        return self._share_inside(own.view(torch.uint8).unsqueeze(0), flat.nbytes)[0].view(flat.dtype)

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        own = self._part(values.view(torch.uint8)).view(values.dtype)
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self._across)
        return self._share_inside(own.view(torch.uint8).unsqueeze(0), values.nbytes)[0].view(values.dtype)

    def share(self, length: int) -> int:
        return -(-length // (4 * self._per_node)) * 4  # fp32 stay aligned

    def _part(self, message: torch.Tensor) -> torch.Tensor:
        """The part of its node's message that this rank sends."""
        share = self.share(message.numel())
        return (
            torch.nn.functional.pad(message, (0, self._per_node * share - message.numel()))
            .view(-1, share)[self._place]
            .clone()
        )

    def _share_inside(self, rows: torch.Tensor, length: int) -> torch.Tensor:
        """The nodes' whole messages, uint8 [nodes, length], from the parts that reached this rank."""
        by_place = gather(self._inside, rows.reshape(-1)).view(self._per_node, len(rows), -1)
        return by_place.transpose(0, 1).reshape(len(rows), -1)[:, :length]


def ranks_of(
    group: dist.ProcessGroup | None,
    inside: str | None,
    ranks_per_node: int | None,
    shards: dist.ProcessGroup | None = None,
) -> Ranks:
    """The ranks of `group` as workers: each by itself, or those of a node together.

    Args:
        group: None is a world of one.
        inside: as in `Topology`.
        ranks_per_node: default: what torchrun has started on this node (`LOCAL_WORLD_SIZE`).
        shards: as for `Ranks`.

    Raises:
        ValueError: inside="dense" where nobody says how many ranks a node has, or nodes differ in that.
    """
    if inside is None:
        inside = "dense" if shards is None and _several_nodes(group, ranks_per_node) else "compressed"
    if inside == "compressed" or group is None:
        return Ranks(group, shards=shards)
    per_node = ranks_per_node or _started_here(os.environ)
    if per_node is None:
        raise refusal("ranks_per_node with inside='dense'", None, "the number of ranks on each node")
    return Ranks(group) if per_node == 1 else Nodes(group, per_node)


def _several_nodes(group: dist.ProcessGroup | None, ranks_per_node: int | None) -> bool:
    """Whether there are several nodes, known to have several ranks each."""
    return group is not None and ranks_per_node is not None and 1 < ranks_per_node < dist.get_world_size(group)


def _started_here(environment: Mapping[str, str]) -> int | None:
    words = environment.get("LOCAL_WORLD_SIZE")
    return int(words) if words else None
