"""inside="dense": the ranks of a node average their gradients first, and are one worker towards the other nodes.

All ranks of a node then compress the same gradient in the same way, and remember the same; of the message that this
makes, each carries its part to the other nodes, and hands what arrives on inside. A node so sends its payload once,
whatever the number of its ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist

from lightning_gradcomp.averaging import ranks
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.errors import refusal


def subgroup(group: dist.ProcessGroup, members: list[int]) -> dist.ProcessGroup:
    """Those of a group, by their rank in it. Called by them alone, in one order."""
    everyone = dist.get_process_group_ranks(group)
    made = dist.new_group([everyone[member] for member in members], use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


class Nodes(Ranks):
    """Workers that are nodes, of `per_node` consecutive ranks each.

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

    @property
    def between(self) -> dist.ProcessGroup:
        return self._across

    def join(self, flat: torch.Tensor, marks: list[bool]) -> list[bool]:
        own = torch.tensor(marks, dtype=torch.float32).to(flat.device, non_blocking=True)
        dist.all_reduce(flat, group=self._inside)
        flat.div_(self._per_node)
        dist.all_reduce(own, group=self._inside)
        return (own > 0).tolist()

    def gather(self, message: torch.Tensor) -> torch.Tensor:
        return self._handed_on(ranks.gather(self._across, self._part(message)), message.numel())

    def scatter(self, messages: list[torch.Tensor]) -> torch.Tensor:
        rows = ranks.scatter(self._across, [self._part(message) for message in messages], self.worker)
        return self._handed_on(rows, messages[self.worker].numel())

    def add(self, flat: torch.Tensor) -> torch.Tensor:
        own = self._part(flat.view(torch.uint8)).view(flat.dtype)
        ranks.add(self._across, own)
        return self._handed_on(own.view(torch.uint8).unsqueeze(0), flat.nbytes)[0].view(flat.dtype)

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        own = self._part(values.view(torch.uint8)).view(values.dtype)
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=self._across)
        return self._handed_on(own.view(torch.uint8).unsqueeze(0), values.nbytes)[0].view(values.dtype)

    def share(self, length: int) -> int:
        return -(-length // (4 * self._per_node)) * 4  # fp32 stay aligned

    def _part(self, message: torch.Tensor) -> torch.Tensor:
        """What this rank carries of its node's message."""
        share = self.share(message.numel())
        return (
            torch.nn.functional.pad(message, (0, self._per_node * share - message.numel()))
            .view(-1, share)[self._place]
            .clone()
        )

    def _handed_on(self, rows: torch.Tensor, length: int) -> torch.Tensor:
        """The nodes' whole messages, uint8 [nodes, length], from the parts that reached this rank."""
        by_place = ranks.gather(self._inside, rows.reshape(-1)).view(self._per_node, len(rows), -1)
        return by_place.transpose(0, 1).reshape(len(rows), -1)[:, :length]


def workers(group: dist.ProcessGroup | None, inside: str, ranks_per_node: int | None) -> Ranks:
    """The ranks of `group` as workers: each by itself, or those of a node together.

    Args:
        group: None is a world of one.
        inside: as in `Route`.
        ranks_per_node: default: what torchrun has started on this node (`LOCAL_WORLD_SIZE`).

    Raises:
        ValueError: inside="dense" where nobody says how many ranks a node has, or nodes differ in that.
    """
    if inside == "compressed" or group is None:
        return Ranks(group)
    per_node = ranks_per_node or _started_here(os.environ)
    if per_node is None:
        raise refusal("ranks_per_node with inside='dense'", None, "the number of ranks on each node")
    return Ranks(group) if per_node == 1 else Nodes(group, per_node)


def _started_here(environment: Mapping[str, str]) -> int | None:
    words = environment.get("LOCAL_WORLD_SIZE")
    return int(words) if words else None
