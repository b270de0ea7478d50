"""The workers of a run, and their collectives.

Law: a collective has the same shape on all ranks. gloo aborts or hangs where it differs; tests/threads.py checks it.

A worker compresses a gradient and keeps a residual. It is one rank (`Ranks`), or all ranks of a node (`Nodes`,
inside="dense").
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import torch
import torch.distributed as dist

from lightning_gradcomp.errors import refusal

ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
"""torch 2.14 renamed it."""

SHORT = 262_144
"""Largest message in bytes that is gathered by an all-to-all, in which every rank writes to all others at once. gloo's
all-gather is a ring: it pays the link's latency N-1 times, but uses the bandwidth better for long messages."""

SHORT_SUM = 2**20
"""Largest sum in bytes that uses one or two such messages. With two to four ranks, gloo's ring pays the link's latency
5 to 15 times, these messages 2 to 5 times for the same bytes. For longer sums a ring copies less."""

EXIT_PAUSE = 0.05
"""Seconds. The interpreter switches threads every 0.005 s."""


@cache
def pause_at_exit() -> None:
    """Make the interpreter pause briefly at exit. Only the first call in a process has an effect.

    gloo's threads release a collective's tensors shortly after it completes, and need the interpreter lock to do so. If
    the interpreter is already shutting down, the thread ends inside a destructor, and the process aborts after a
    successful training ("terminate called without an active exception"; with torch 2.15, about one run in ten, also
    with plain DDP). Launchers report that as a failure.
    """
    atexit.register(time.sleep, EXIT_PAUSE)


def dense_traffic(num_bytes: int, world: int) -> int:
    """Bytes that a rank sends when a ring all-reduce averages `num_bytes`: 2 (N-1)/N · `num_bytes`."""
    return round(2 * (world - 1) / world * num_bytes)


class Ranks:
    """The ranks of a process group, each a worker.

    Args:
        group: None is a world of one, which exchanges nothing.
        world: without a group, the number of ranks for which traffic is computed.
        shards: the ranks of this replica, for a sharded model. Together they are one worker. Each exchanges payloads
            only with the ranks of `group`, which hold the same shard; all `shards` agree on norms and flags.
    """

    between = ""
    """Between what workers' messages travel, for reports."""

    def __init__(
        self, group: dist.ProcessGroup | None, world: int = 1, shards: dist.ProcessGroup | None = None
    ) -> None:
        self.group, self.shards = group, shards if shards and shards.size() > 1 else None
        self.world = group.size() if group else world
        self.rank = group.rank() if group else 0
        self.workers, self.worker, self.per_worker, self.place = self.world, self.rank, 1, 0
        """Number of workers, index of this rank's worker, ranks per worker, and index of this rank in its worker."""
        self.groups = [group] if group else []
        """The process groups in which messages travel."""
        if group:
            pause_at_exit()

    def average_inside(self, flats: list[torch.Tensor], flags: list[bool]) -> list[bool]:
        """Average `flats` (fp32) in place over this worker's ranks. Returns True for each flag that any of them set."""
        return flags

    def sum_inside(self, flats: list[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's part of the sum of each of `flats` over this worker's ranks, given what this rank has of it.

        A part is fp32 [n] of a sum of fp32 [ranks per worker · n].
        """
        return flats

    def join_inside(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """The sums of which `sum_inside` returned parts, from the parts of all this worker's ranks."""
        return parts

    def over_shards(self, values: torch.Tensor) -> torch.Tensor:
        """The elementwise sum of a few `values` (fp32 [m]) over the ranks of a sharded replica."""
        if self.shards:
            values = values.clone()
            dist.all_reduce(values, group=self.shards)
        return values

    def any_shard(self, flags: list[bool], device: torch.device) -> list[bool]:
        """True for each of `flags` that any rank of a sharded replica set."""
        if not self.shards:
            return flags
        found = self.over_shards(torch.tensor(flags, dtype=torch.float32).to(device, non_blocking=True))
        return (found > 0).tolist()

    def start_gather(self, message: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start a `gather`, and return a function that waits for the messages. Call these in one order on all ranks."""
        out = message.new_empty(self.world * message.numel())
        if self.world > 2 and message.nbytes <= SHORT and not message.is_cuda:
            work: Any = dist.all_to_all_single(out, message.repeat(self.world), group=self.group, async_op=True)
        else:
            work = getattr(dist, ALL_GATHER)(out, message, group=self.group, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return out.view(self.world, -1)

        return wait

    def gather(self, message: torch.Tensor) -> torch.Tensor:
        """All workers' messages in worker order, [N, L], given this worker's, [L]. `Nodes` need uint8."""
        return self.start_gather(message)()

    def scatter(self, messages: list[torch.Tensor]) -> torch.Tensor:
        """Send messages[j] (uint8, any length) to worker j. Returns what all workers sent to this one, uint8 [N, L]."""
        length, sizes = messages[self.worker].numel(), [message.numel() for message in messages]
        out = messages[0].new_empty(self.world * length)
        dist.all_to_all_single(out, torch.cat(messages), [length] * self.world, sizes, group=self.group)
        return out.view(self.world, length)

    def start_swap(self, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to send row j of `rows`, [N, L], to worker j. Call it in one order on all ranks.

        On a CPU it is an all-to-all whose receives are posted before its sends. gloo's own posts its sends first, which
        takes 10 to 17 % longer for messages of megabytes over 1 Gbit/s.

        Returns a function that waits for what all workers sent to this one, [N, L], in their order.
        """
        received, rank, works = rows.new_empty(rows.shape), self.rank, []
        if rows.is_cuda:
            works.append(dist.all_to_all_single(received, rows.contiguous(), group=self.group, async_op=True))
        else:
            others = [(rank + distance) % self.world for distance in range(1, self.world)]
            works += [dist.irecv(received[other], group=self.group, group_src=other) for other in others]
            works += [dist.isend(rows[other], group=self.group, group_dst=other) for other in others]
            received[rank] = rows[rank]

        def wait() -> torch.Tensor:
            for work in works:
                work.wait()
            return received

        return wait

    def add(self, flat: torch.Tensor) -> torch.Tensor:
        """The sum of `flat` (fp32 [n]) over the workers. May overwrite `flat`."""
        if self.world > 1:
            add(self.group, flat)
        return flat

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum of `values` (fp32 [m]) over the workers."""
        largest = values.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return largest

    def share(self, length: int) -> int:
        """The bytes that this rank sends of its worker's message of `length` bytes."""
        return length

    def gather_traffic(self, length: int) -> int:
        """Bytes that this rank sends to other workers in `gather`."""
        return (self.workers - 1) * self.share(length)

    def scatter_traffic(self, lengths: list[int], worker: int) -> int:
        """The same for a rank of `worker` in `scatter`."""
        return sum(self.share(length) for length in lengths) - self.share(lengths[worker])

    def add_traffic(self, num_bytes: int, device: torch.device) -> int:
        """The same in `add`, for fp32 on `device`."""
        share = self.share(num_bytes)
        if self.workers > 2 and in_short_messages(share, device):
            return 2 * (self.workers - 1) * 4 * -(-share // (4 * self.workers))
        return dense_traffic(share, self.workers)

    def maximum_traffic(self, num_bytes: int) -> int:
        """The same in `maximum`."""
        return dense_traffic(self.share(num_bytes), self.workers)

    def dense_traffic(self, num_bytes: int) -> int:
        """Bytes that a rank sends to other workers when a ring of all ranks averages `num_bytes`.

        A node sends to one neighbour in such a ring, so its ranks share the bytes that leave it.
        """
        return dense_traffic(num_bytes, self.world) // self.per_worker


def in_short_messages(num_bytes: int, device: torch.device) -> bool:
    """True if a sum of `num_bytes` uses short messages instead of a ring."""
    return device.type != "cuda" and num_bytes <= SHORT_SUM


def add(group: dist.ProcessGroup | None, flat: torch.Tensor) -> None:
    """Replace `flat` [n] with its sum over the ranks, bit-identical on all of them."""
    if not flat.numel():
        return
    if not in_short_messages(flat.nbytes, flat.device):
        dist.all_reduce(flat, group=group)
        return
    world = group.size() if group else 1
    part = -(-flat.numel() // world) if world > 2 else flat.numel()
    if world > 2:  # each rank sums one part, and sends the result to all
        rows = flat.new_empty(world * part)
        padded = torch.nn.functional.pad(flat, (0, world * part - flat.numel()))
        dist.all_to_all_single(rows, padded, group=group)
        everyones = gather(group, rows.view(world, part).sum(0).view(torch.uint8))
        flat.copy_(everyones.view(-1).view(flat.dtype)[: flat.numel()])
    elif world == 2:  # as many bytes as summing halves, in half the time
        rows = gather(group, flat.view(torch.uint8)).view(flat.dtype)
        torch.add(rows[0], rows[1], out=flat)


def gather(group: dist.ProcessGroup | None, message: torch.Tensor) -> torch.Tensor:
    """All ranks' messages, [L], in rank order: [N, L]."""
    return Ranks(group).gather(message)


def subgroup(group: dist.ProcessGroup, members: list[int]) -> dist.ProcessGroup:
    """The subgroup of these ranks of `group`, with its timeout. Only the members call it, all in one order."""
    everyone = dist.get_process_group_ranks(group)
    timeout = group._get_backend(group._device_types[0]).options._timeout
    made = dist.new_group([everyone[member] for member in members], timeout, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


class Nodes(Ranks):
    """inside="dense": the ranks of a node average their gradients first, and form one worker.

    All ranks of a node then compress the same gradient and keep the same residual. Each sends its part of the node's
    message to the other nodes, and shares what it receives with its own node. A node thus sends its payload once,
    whatever its number of ranks. In few bits each rank averages its part over the nodes.
    """

    between = " between nodes"

    def __init__(self, group: dist.ProcessGroup, per_node: int) -> None:
        super().__init__(group)
        if self.world % per_node:
            raise refusal("ranks with inside='dense'", self.world, f"a multiple of the {per_node} ranks of a node")
        node, self.place = divmod(self.rank, per_node)
        self.workers, self.worker, self.per_worker = self.world // per_node, node, per_node
        self._inside = Ranks(inside := subgroup(group, list(range(node * per_node, (node + 1) * per_node))))
        self._across = Ranks(across := subgroup(group, list(range(self.place, self.world, per_node))))
        self.groups = [across, inside]

    def average_inside(self, flats: list[torch.Tensor], flags: list[bool]) -> list[bool]:
        own = torch.tensor(flags, dtype=torch.float32).to(flats[0].device, non_blocking=True)
        for flat in flats:
            dist.all_reduce(flat, group=self._inside.group)
            flat.div_(self.per_worker)
        dist.all_reduce(own, group=self._inside.group)
        return (own > 0).tolist()

    def sum_inside(self, flats: list[torch.Tensor]) -> list[torch.Tensor]:
        rows = torch.cat([flat.view(self.per_worker, -1) for flat in flats], 1)
        total = reduce(torch.add, self._inside.start_swap(rows)())  # in rank order, which no reduce-scatter promises
        return list(total.split([flat.numel() // self.per_worker for flat in flats]))

    def join_inside(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        rows = self._inside.gather(torch.cat(parts))
        return [flat.reshape(-1) for flat in rows.split([part.numel() for part in parts], 1)]

    def start_swap(self, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        return self._across.start_swap(rows)

    def start_gather(self, message: torch.Tensor) -> Callable[[], torch.Tensor]:
        rows = self._across.start_gather(self._part(message))
        return lambda: self._share_inside(rows(), message.numel())

    def scatter(self, messages: list[torch.Tensor]) -> torch.Tensor:
        rows = self._across.scatter([self._part(message) for message in messages])
        return self._share_inside(rows, messages[self.worker].numel())

    def add(self, flat: torch.Tensor) -> torch.Tensor:
        own = self._part(flat.view(torch.uint8)).view(flat.dtype)
        add(self._across.group, own)
        return self._share_inside(own.view(torch.uint8).unsqueeze(0), flat.nbytes)[0].view(flat.dtype)

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        own = self._part(values.view(torch.uint8)).view(values.dtype)
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self._across.group)
        return self._share_inside(own.view(torch.uint8).unsqueeze(0), values.nbytes)[0].view(values.dtype)

    def share(self, length: int) -> int:
        return -(-length // (4 * self.per_worker)) * 4  # fp32 stay aligned

    def _part(self, message: torch.Tensor) -> torch.Tensor:
        share = self.share(message.numel())
        padded = torch.nn.functional.pad(message, (0, self.per_worker * share - message.numel()))
        return padded.view(-1, share)[self.place].clone()

    def _share_inside(self, rows: torch.Tensor, length: int) -> torch.Tensor:
        """The nodes' whole messages, uint8 [nodes, length], from the parts that this node's ranks received."""
        by_place = self._inside.gather(rows.reshape(-1)).view(self.per_worker, len(rows), -1)
        return by_place.transpose(0, 1).reshape(len(rows), -1)[:, :length]


def ranks_of(
    group: dist.ProcessGroup | None,
    inside: str | None,
    ranks_per_node: int | None,
    shards: dist.ProcessGroup | None = None,
) -> Ranks:
    """The ranks of `group` as workers: one worker per rank, or per node. Without a group, a world of one.

    By default, `ranks_per_node` is the number of ranks that torchrun started on this node (`LOCAL_WORLD_SIZE`).
    """
    several_nodes = group is not None and ranks_per_node is not None and 1 < ranks_per_node < group.size()
    inside = inside or ("dense" if several_nodes and not shards else "compressed")
    if group is None or inside == "compressed":
        return Ranks(group, shards=shards)
    per_node = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE") or 0)
    if not per_node:
        raise refusal("ranks_per_node with inside='dense'", None, "the number of ranks on each node")
    return Ranks(group) if per_node == 1 else Nodes(group, per_node)
