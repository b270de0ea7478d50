"""A sharded model's error feedback in distributed checkpoints (`torch.distributed.checkpoint`).

Every rank writes the state of its own shards. For each replica, the checkpoint has one tensor in the shape of the whole
parameter, under its name, so that any other mesh can read its shards from it:

    whole.0.velocity.layers.1.weight     replica 0's, in the parameter's shape
    each.0.query.layers.1.weight         state with another shape, for every shard of replica 0: [shards, ...]

The file state.json, beside the tensors, has the rest of `GradientAverager.state_dict()`.

If the number of replicas changes, each starts with the mean of all states, as ranks do (checkpoint_state.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lightning_gradcomp.averaging.averager import GradientAverager
from lightning_gradcomp.averaging.checkpoint_state import mean_state
from lightning_gradcomp.averaging.fsdp.shards import Shards, local
from lightning_gradcomp.errors import refusal

REST = "state.json"


def save_sharded_state(averager: GradientAverager, folder: str | Path) -> None:
    """Write all ranks' states into `folder`, which all ranks must see. Collective.

    The folder is for this state only, and is created if it does not exist.
    """
    shards, replica = _shards(averager), averager.ranks.rank
    state = averager.state_dict()
    tensors = {}
    memory = state.pop("memory")
    for kind, parts in memory.items():
        for name, part in parts.items():
            if shards.has_shape(name, part):
                tensors[f"whole.{replica}.{kind}.{name}"] = shards.divided(name, part)
            else:
                tensors[f"each.{replica}.{kind}.{name}"] = shards.stacked(part)
    rest = {**state, "replicas": averager.world, "shards": shards.number, "kinds": sorted(memory)}
    if dist.get_rank() == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / REST).write_text(json.dumps(rest))
    dcp.save(tensors, checkpoint_id=folder)


def load_sharded_state(averager: GradientAverager, folder: str | Path) -> None:
    """Replace this rank's state with the one in `folder`, saved by a mesh of any shape. Collective.

    Raises:
        ValueError: if `GradientAverager.load_state_dict` would raise it, or the folder has no state.
    """
    try:
        rest = json.loads((Path(folder) / REST).read_text())
    except (OSError, ValueError) as error:
        raise refusal(
            "the state of GradientAverager", f"{folder}: {error}", "a folder of save_sharded_state"
        ) from error
    replicas = rest["replicas"]
    if replicas == averager.world:
        averager.load_state_dict({**rest, "memory": _memory(averager, folder, rest, averager.ranks.rank)})
        return
    states = ({**rest, "memory": _memory(averager, folder, rest, replica)} for replica in range(replicas))
    averager.load_state_dict(mean_state(states))


def _memory(
    averager: GradientAverager, folder: str | Path, rest: Mapping[str, Any], replica: int
) -> dict[str, dict[str, torch.Tensor]]:
    """Kind -> parameter name -> this rank's shard of a replica's state."""
    shards = _shards(averager)
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    wanted: dict[str, torch.Tensor] = {}
    for key, entry in saved.items():
        form, number, _, name = key.split(".", 3)
        if (
            int(number) != replica
            or name not in shards.here
            or not isinstance(entry, dcp.metadata.TensorStorageMetadata)
        ):
            continue
        if form == "whole":
            if tuple(entry.size) != shards.whole_shapes[name]:
                raise refusal(f"state of {name!r}", f"shape {tuple(entry.size)}", f"{shards.whole_shapes[name]}")
            own = torch.zeros(shards.here[name], dtype=entry.properties.dtype)
            wanted[key] = shards.divided(name, own)
        else:
            wanted[key] = torch.zeros(entry.size, dtype=entry.properties.dtype)
    dcp.load(wanted, checkpoint_id=folder)
    memory: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in rest["kinds"]}
    for key, part in wanted.items():
        form, _, kind, name = key.split(".", 3)
        row = shards.rank if rest["shards"] == shards.number else 0
        memory[kind][name] = local(part) if form == "whole" else part[row]
    return memory


def whole_memory(averager: GradientAverager, memory: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    """This replica's state in the parameters' shapes, on the CPU. State with other shapes is the first shard's.

    Collective over the replica's ranks.
    """
    shards = _shards(averager)
    everyones: list[Any] = [None] * shards.number
    names = {kind: [(n, shards.has_shape(n, part)) for n, part in parts.items()] for kind, parts in memory.items()}
    dist.all_gather_object(everyones, names, group=shards.group)
    whole: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in memory}
    for kind in sorted(whole):
        known = dict(pair for each in everyones for pair in each[kind])
        for name in sorted(known):
            part = memory[kind].get(name)
            if known[name]:
                own = part
                if own is None:
                    own = torch.zeros(shards.shapes_on(shards.rank)[name], dtype=torch.float32)
                whole[kind][name] = shards.divided(name, own).full_tensor().cpu()
            elif part is not None:
                whole[kind][name] = part.cpu()
    return whole


def own_memory(averager: GradientAverager, memory: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    """This rank's shards of a state that has the parameters' shapes."""
    shards = _shards(averager)
    return {
        kind: {
            name: shards.cut(name, part) if tuple(part.shape) == shards.whole_shapes[name] else part
            for name, part in parts.items()
            if name in shards.here
        }
        for kind, parts in memory.items()
    }


def _shards(averager: GradientAverager) -> Shards:
    if averager.shards is None:
        raise refusal("the model of GradientAverager", "one that is not sharded", "one prepared by fully_shard")
    return averager.shards
