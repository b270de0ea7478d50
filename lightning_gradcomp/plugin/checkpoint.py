"""What a compressor remembers, in Lightning's checkpoint: the state of every rank, gathered into rank 0's file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_gradcomp.averaging import GradientAverager
from lightning_gradcomp.registry import entries

KEY = "lightning_gradcomp"


def in_step(module: LightningModule | None) -> bool:
    """Whether all ranks are here to gather: not after an interruption, which may have hit one of them alone."""
    if module is None:
        return False
    if module.trainer.state.status == TrainerStatus.INTERRUPTED:
        rank_zero_warn("Interrupted: this checkpoint holds the model, without what the ranks had not sent yet.")
        return False
    return True


def gather(averager: GradientAverager) -> dict[str, Any]:
    """Every rank's state on rank 0, an empty list of them elsewhere. A collective call."""
    state = averager.state_dict()
    everyone: list[Any] | None = [None] * averager.world if dist.get_rank() == 0 else None
    dist.gather_object(state, everyone, dst=0)
    return {"compressor": _name(averager), "world_size": averager.world, "ranks": everyone or []}


def restore(averager: GradientAverager, checkpoint: Mapping[str, Any]) -> None:
    """Give `averager` its rank's state back; the mean of all ranks' where their number has changed.

    The mean keeps what is conserved: everything applied + the mean over ranks of what is remembered.
    """
    saved = checkpoint.get(KEY)
    if saved is None or saved["compressor"] != _name(averager):
        source = "a run without compression" if saved is None else f"compressor {saved['compressor']!r}"
        rank_zero_info(f"The checkpoint is of {source}: {_name(averager)} starts with nothing remembered.")
        averager.steps = checkpoint["global_step"]
        return
    ranks = saved["ranks"]
    if saved["world_size"] == averager.world:
        averager.load_state_dict(ranks[dist.get_rank()])
        return
    rank_zero_info(
        f"The checkpoint is of {saved['world_size']} ranks: each of {averager.world} starts with their mean."
    )
    averager.load_state_dict({"steps": ranks[0]["steps"], "memory": _mean([rank["memory"] for rank in ranks])})


def export_momentum(averager: GradientAverager, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Write the mean momentum into `state` (an optimizer's state_dict) where plain SGD would keep it. Collective."""
    buffers = averager.momentum_buffers()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        if parameter in buffers:  # in a dict of its own: those in a state_dict are the optimizer's
            state["state"][index] = {**state["state"].get(index, {}), "momentum_buffer": buffers[parameter]}


def _mean(memories: list[dict[str, dict[str, torch.Tensor]]]) -> dict[str, dict[str, torch.Tensor]]:
    """Entry by entry; a rank that lacks an entry remembers 0 of it. What is no number (a generator) is left out."""
    kinds = {
        kind
        for memory in memories
        for kind, parts in memory.items()
        if all(part.is_floating_point() for part in parts.values())
    }
    keys = {(kind, name) for memory in memories for kind in kinds for name in memory[kind]}
    mean: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in kinds}
    for kind, name in sorted(keys):
        present = [memory[kind][name] for memory in memories if name in memory[kind]]
        mean[kind][name] = torch.stack(present).sum(0) / len(memories)
    return mean


def _name(averager: GradientAverager) -> str:
    return next(entry.name for entry in entries() if entry.cls is type(averager.compressor))
