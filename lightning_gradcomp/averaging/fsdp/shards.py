"""FSDP2's sharded models as plain tensors: how a rank's shards enter and leave a compressed step.

The parameters of a module that `torch.distributed.fsdp.fully_shard` has prepared are DTensors over the ranks of a
replica. So are their gradients after backward, and the optimizer's state. A compressed step works on plain tensors.
`Shards` holds a plain parameter for each of this rank's shards, which shares its memory, and an optimizer of these:

    enter    p.grad and optimizer.state[p], DTensors  ->  plain gradients and plain optimizer state
             the step: compensate, encode, exchange (with the ranks that hold the same shard of other replicas), ...
    leave    the step's gradients and state           ->  DTensors again

Whole tensors are never built: every rank compresses its own shards and keeps their residuals. A parameter whose shard
is empty on this rank is skipped.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard

from lightning_gradcomp.compressors.layout import plain_name
from lightning_gradcomp.errors import refusal

Shape = tuple[int, ...]
OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose momentum a compressor may own."""

MESH = ("replicate", "shard")
"""Names of the mesh's dimensions."""


def is_sharded(model: nn.Module) -> bool:
    """True if `fully_shard` has prepared the model."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise refusal("model", "FullyShardedDataParallel (FSDP1)", "one prepared by torch.distributed.fsdp.fully_shard")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return True
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def reshard(model: nn.Module) -> None:
    """Free whole parameters. A forward pass without a backward leaves them, and FSDP would reuse them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, sharing its memory; any other tensor unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


@dataclass(frozen=True)
class Sharding:
    """How `fully_shard` divides a tensor: along `dim` into `number` parts of ceil(size / number), the last shorter."""

    dim: int
    number: int

    def shape(self, whole: Shape, shard: int) -> Shape:
        """The shape of shard number `shard`."""
        size = whole[self.dim]
        part = -(-size // self.number)
        own = max(0, min(size, (shard + 1) * part) - shard * part)
        return (*whole[: self.dim], own, *whole[self.dim + 1 :])


class Shards:
    """This rank's shards of a model's parameters, as plain parameters that share their memory.

    Args:
        model: a model prepared by `fully_shard` with a one-dimensional mesh.
        optimizer: the optimizer of the model's parameters, if it is known.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        reshard(model)
        every = [(plain_name(name), _checked(name, parameter)) for name, parameter in model.named_parameters()]
        self.mesh = every[0][1].device_mesh
        self.group: dist.ProcessGroup = self.mesh.get_group()
        """The ranks of this replica, each with its own shards."""
        self.number, self.rank = self.group.size(), self.group.rank()
        self.whole_shapes = {name: tuple(parameter.shape) for name, parameter in every}
        """Shape of every whole parameter."""
        self.shardings = {name: Sharding(_dim(p), self.number) for name, p in every}
        self._wholes = [(name, p) for name, p in every if p.to_local().numel()]
        self._empty = [(name, p) for name, p in every if not p.to_local().numel()]
        with torch.no_grad():
            self.named = [(name, nn.Parameter(p.to_local(), p.requires_grad)) for name, p in self._wholes]
        """Name and shard of every parameter whose shard on this rank is not empty."""
        self._shard_of = {id(whole): own for (_, whole), (_, own) in self._pairs()}
        self._whole_of = {id(own): whole for (_, whole), (_, own) in self._pairs()}
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """id of a DTensor that `entered` used -> the DTensor and its local part."""
        self.use_optimizer(optimizer)

    def use_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._real = optimizer
        self.optimizer: torch.optim.Optimizer | None = None
        """An optimizer of the plain parameters with the user's options."""
        if type(optimizer) in OPTIMIZERS and self.named:
            make: Any = type(optimizer)
            self.optimizer = make(self._groups(optimizer))

    def _pairs(self) -> Iterator[tuple[tuple[str, Any], tuple[str, nn.Parameter]]]:
        return zip(self._wholes, self.named, strict=True)

    def whole_of(self, own: torch.Tensor) -> nn.Parameter:
        return self._whole_of[id(own)]

    @property
    def trainable(self) -> set[str]:
        """Names of the parameters that require a gradient now, including empty shards."""
        return {name for name, parameter in [*self._wholes, *self._empty] if parameter.requires_grad}

    def shapes_on(self, shard: int) -> dict[str, Shape]:
        """Shape of every parameter's shard on rank `shard` of the replica. Rank 0's are the largest."""
        return {name: self.shardings[name].shape(shape, shard) for name, shape in self.whole_shapes.items()}

    # Into a step and out of it

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, `named` and `optimizer` hold the model's gradients and optimizer state, which go back at the end."""
        self._enter()
        yield
        self._leave()

    @torch.no_grad()
    def _enter(self) -> None:
        known, self._known = self._known, {}
        for (_, whole), (_, own) in self._pairs():
            own.data = whole.to_local()  # loading a state may have moved it
            own.requires_grad_(whole.requires_grad)
            own.grad = None if whole.grad is None else self._local(whole.grad, known)
        if self.optimizer is not None:
            assert self._real is not None
            self.optimizer.param_groups = self._groups(self._real)
            for (_, whole), (_, own) in self._pairs():
                held = self._real.state.get(whole, {})
                self.optimizer.state[own] = {key: self._local(value, known) for key, value in held.items()}

    @torch.no_grad()
    def _leave(self) -> None:
        entered = {id(own): (whole, own) for whole, own in self._known.values()}
        for (_, whole), (_, own) in self._pairs():
            whole.grad = None if own.grad is None else self._whole(own.grad, whole, entered)
        if self.optimizer is not None:
            assert self._real is not None
            for (_, whole), (_, own) in self._pairs():
                made = {key: self._whole(value, whole, entered) for key, value in self.optimizer.state[own].items()}
                if made or whole in self._real.state:
                    held = self._real.state[whole]
                    held.clear()
                    held.update(made)

    def _local(self, value: Any, known: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """The local part of a DTensor. The same DTensor object gives the same object."""
        if not isinstance(value, DTensor):
            return value
        own = known[id(value)][1] if id(value) in known else value.to_local()
        self._known[id(value)] = value, own
        return own

    def _whole(self, value: Any, like: DTensor, entered: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """The DTensor whose local part is `value`. A value that lacks the shard's shape is returned unchanged."""
        if id(value) in entered:
            return entered[id(value)][0]
        if not isinstance(value, torch.Tensor) or value.shape != like.to_local().shape:
            return value
        whole = self.whole(value, like)
        self._known[id(whole)] = whole, value
        return whole

    def whole(self, own: torch.Tensor, like: DTensor) -> DTensor:
        shape, stride = like.shape, like.stride()
        return DTensor.from_local(own, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)

    @torch.no_grad()
    def whole_state(
        self, kept: Mapping[nn.Parameter, Mapping[str, torch.Tensor]], chosen: Container[str]
    ) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
        """Convert state of the plain parameters, torch's name -> tensor, to state of the model's parameters.

        Empty shards of the parameters in `chosen` get the same keys.
        """
        found, keys = {}, next(iter(kept.values()), {})
        for name, like in self._empty:
            if name in chosen and like.requires_grad:
                found[like] = {key: self.whole(like.to_local().float(), like) for key in keys}
        for own, held in kept.items():
            like = self._whole_of[id(own)]
            found[like] = {key: self.whole(value, like) for key, value in held.items()}
        return found

    # In checkpoints

    @property
    def here(self) -> dict[str, Shape]:
        """Name -> shape of this rank's shard."""
        return {name: tuple(own.shape) for name, own in self.named}

    def has_shape(self, name: str, part: torch.Tensor) -> bool:
        return self.here.get(name) == tuple(part.shape)

    def divided(self, name: str, part: torch.Tensor) -> DTensor:
        """A DTensor with the parameter's shape and `part` as this rank's part."""
        shape, placement = torch.Size(self.whole_shapes[name]), Shard(self.shardings[name].dim)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(part, self.mesh, [placement], run_check=False, shape=shape, stride=stride)

    def stacked(self, part: torch.Tensor) -> DTensor:
        """A DTensor with one row per rank of the replica: [shards, *part.shape]."""
        return DTensor.from_local(part.unsqueeze(0), self.mesh, [Shard(0)], run_check=False)

    def cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a tensor that has the parameter's shape."""
        sharding = self.shardings[name]
        start = self.rank * -(-whole.shape[sharding.dim] // self.number)
        return whole.narrow(sharding.dim, start, self.here[name][sharding.dim]).clone()

    # The plain optimizer

    def _groups(self, optimizer: Any) -> list[dict[str, Any]]:
        known = self._shard_of
        return [
            {**group, "params": [known[id(p)] for p in group["params"] if id(p) in known]}
            for group in optimizer.param_groups
        ]


def _checked(name: str, parameter: torch.Tensor) -> DTensor:
    """Return the parameter. Raises ValueError unless `fully_shard` sharded it with a one-dimensional mesh."""
    what, allowed = f"parameter {name!r}", "one that fully_shard(model, mesh=mesh['shard']) has prepared"
    if not isinstance(parameter, DTensor):
        raise refusal(what, "a tensor that is not sharded, in a model that is", allowed)
    mesh, placements = parameter.device_mesh, parameter.placements
    if mesh.ndim != 1 or type(placements[0]) is not Shard:
        got = f"{', '.join(map(str, placements))} over {mesh.mesh_dim_names or mesh.ndim}"
        raise refusal(what, got, f"{allowed}: one dimension, along which it is sharded; replicas are averaged here")
    if parameter.to_local().device.type != mesh.device_type:
        raise refusal(f"CPU offload: {what}", f"shards on {parameter.to_local().device}", f"on {mesh.device_type}")
    return parameter


def mesh_shape(replicate: int | str, shard: int | str, nodes: int, per_node: int) -> tuple[int, int]:
    """Return (replicas, shards per replica). The other size determines an "auto"; with two, each node is a replica."""
    world = nodes * per_node
    if isinstance(replicate, str) and isinstance(shard, str):
        return nodes, per_node
    if isinstance(replicate, str):
        replicate = max(world // int(shard), 1)
    elif isinstance(shard, str):
        shard = max(world // replicate, 1)
    if replicate * int(shard) != world:
        got = f"replicate={replicate} x shard={shard}"
        where = f"{nodes} node{'s' * (nodes > 1)} with {per_node} rank{'s' * (per_node > 1)} each"
        raise refusal(f"the mesh of {where}", got, f"a product of {world}")
    return replicate, int(shard)


def check_group(shards: Shards, group: dist.ProcessGroup | None, topology: str, inside: str | None) -> None:
    """Raises ValueError if `group` is not that of the same shards of other replicas, or the topology is partitioned."""
    what, allowed = "process_group with a sharded model", "that of the replicate dimension: mesh.get_group('replicate')"
    if group is None and dist.get_world_size() > shards.number:
        raise refusal(what, None, allowed)
    mine = dist.get_process_group_ranks(shards.group)
    if group is not None and len(set(mine) & set(dist.get_process_group_ranks(group))) > 1:
        raise refusal(what, "ranks that hold other shards of the same replica", allowed)
    if topology != "all_gather":
        raise refusal("topology with a sharded model", topology, "'all_gather'")
    if inside == "dense":
        raise refusal("inside with a sharded model", inside, "'compressed': FSDP averages inside a replica")


def _dim(parameter: DTensor) -> int:
    placement = parameter.placements[0]
    assert isinstance(placement, Shard)
    return placement.dim
