"""The states of all ranks' averagers in a checkpoint: how they are saved, and how each rank loads its own.

The key "lightning_gradcomp" holds the compressor's name, the number of ranks, and one of

    ranks: [state of rank 0, ...]        gather: everything in one file
    sidecars: "name of a folder"         sidecar: one file per rank, in a folder beside the checkpoint
    mean: state                          mean: one copy for any number of ranks
    sharded: "name of a folder"          for a sharded model: a folder in the distributed checkpoint
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.rank_zero import WarningCache, rank_zero_info, rank_zero_warn

from lightning_gradcomp.averaging import GradientAverager, load_sharded_state, mean_state
from lightning_gradcomp.averaging.checkpoint_state import PARTITION, all_floating, check_state
from lightning_gradcomp.averaging.exchange import all_reduce_mean
from lightning_gradcomp.averaging.fsdp.checkpoint import own_memory
from lightning_gradcomp.averaging.trainable import parameters_of
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.local_sgd.rounds import Rounds
from lightning_gradcomp.parameter_server.averager import AsyncAverager
from lightning_gradcomp.plugin.checkpoint_files import Sidecars, of_rank_zero
from lightning_gradcomp.registry import entries

KEY = "lightning_gradcomp"
FORMAT = 1
GATHER_LIMIT = 2**30
"""Largest total of all ranks' states, in bytes, that "auto" gathers into one file. Every rank reads all of it."""

once = WarningCache()
"""Logs each message once."""

State = dict[str, Any]
OptimizerState = dict[torch.nn.Parameter, dict[str, torch.Tensor]]
"""Parameter -> torch's name -> tensor: optimizer state that the averager keeps."""
Saved = GradientAverager | Rounds | AsyncAverager
"""An object with a state on each rank."""


def interrupted(module: LightningModule) -> bool:
    """True if an interruption ended the fit, perhaps only on this rank.

    A SIGTERM is not an interruption: it ends all ranks after the same step (plugin/sigterm.py).
    """
    return module.trainer.state.status == TrainerStatus.INTERRUPTED and not module.trainer.received_sigterm


def all_ranks_present(module: LightningModule | None) -> bool:
    """True if all ranks can gather. False after an interruption, with a warning."""
    if module is None:
        return False
    if interrupted(module):
        rank_zero_warn("Interrupted: this checkpoint holds the model, but not the ranks' residuals.")
        return False
    return True


def rank_state(averager: Saved, accumulating: bool) -> State:
    """This rank's state on the CPU. While gradients accumulate, it includes those so far."""
    state = averager.state_dict()
    memory = {kind: {name: part.cpu() for name, part in parts.items()} for kind, parts in state["memory"].items()}
    if accumulating:
        memory["accumulated"] = {name: part.cpu() for name, part in averager.gradients.local().items()}
    return {**state, "memory": memory}


class RankStates:
    """Saves the states of all ranks in checkpoints, and restores them."""

    def __init__(self, mode: str, sidecars: Sidecars, nodes: int) -> None:
        self.mode, self.sidecars, self.nodes = mode, sidecars, nodes
        self._removed: list[Any] = []
        """Paths of checkpoints that rank 0 removed without the other ranks' knowledge."""
        self._accumulated: dict[str, torch.Tensor] = {}

    def put_into(self, checkpoint: State, path: Any, averager: Saved, accumulating: bool) -> list[State]:
        """Add all ranks' states to rank 0's `checkpoint`, or write them beside `path`. Collective.

        Returns, on rank 0, which writes the optimizer's state: all ranks' states, their mean, or its own. Elsewhere [].
        """
        state = rank_state(averager, accumulating)
        mode = self.mode
        if mode == "auto":  # a rank that skipped all rounds so far has less state
            mode = of_rank_zero(self._chosen(averager.world * _size(state, averager)))
        saved: State = {"format": FORMAT, "compressor": name_of(averager), "world_size": averager.world}
        states: list[State] = [state]
        if mode == "sidecar":
            self.remove_on_every_disk()
            saved["sidecars"] = self.sidecars.write(state, path, averager.steps)
        elif mode == "mean":
            saved["mean"] = mean_over_ranks(state, averager)
            states = [saved["mean"]]
        elif mode == "gather":
            everyone: list[Any] | None = [None] * averager.world if dist.get_rank() == 0 else None
            dist.gather_object(state, everyone, dst=0)
            saved["ranks"] = states = everyone or []
        if mode != "drop":
            checkpoint[KEY] = saved
        return states if averager.rank == 0 else []

    def _chosen(self, total: int) -> str:
        """Choose the mode for `total` bytes: "sidecar" if gathering would strain the network or rank 0's memory."""
        if total <= (GATHER_LIMIT if self.nodes == 1 else 0) or not self.sidecars.possible:
            return "gather"
        once.info("The ranks' residuals are saved in one file per rank, in folders beside the checkpoints.")
        return "sidecar"

    def after_saving(self, saved: Sequence[State], path: Any) -> None:
        """Remove an earlier checkpoint's sidecars once rank 0 has written a new one. Collective if it has sidecars."""
        keep = {entry["sidecars"] for entry in saved if "sidecars" in entry}
        if keep:
            dist.barrier()  # the earlier one is needed until the new one is complete
        if keep or not dist.is_initialized() or dist.get_rank() == 0:
            self.sidecars.remove_old(path, keep)

    def after_removing(self, path: Any) -> None:
        """Remove the sidecars of a checkpoint that rank 0 removed.

        Other ranks do nothing, because they would remove the worst checkpoint by their own metric.
        """
        if not dist.is_initialized() or dist.get_rank() == 0:
            self.sidecars.remove_old(path)
            self._removed.append(path)

    def remove_on_every_disk(self) -> None:
        """Remove the sidecars of checkpoints that rank 0 removed, on other nodes' disks too. Collective."""
        for path in of_rank_zero(self._removed):
            self.sidecars.remove_old(path)
        self._removed = []

    def restore(self, checkpoint: Mapping[str, Any], path: Any, averager: Saved) -> None:
        """Load this rank's state into `averager`, or the mean of all states if the number of ranks has changed."""
        saved = None if self.mode == "drop" else checked_header(checkpoint.get(KEY))
        if saved is None or saved["compressor"] != name_of(averager):
            held = "no residuals" if saved is None else f"residuals of {saved['compressor']!r}"
            why = "checkpoint_state='drop'" if self.mode == "drop" else f"the checkpoint holds {held}"
            rank_zero_info(f"{why}: {name_of(averager)} starts with empty residuals.")
            return
        world = saved["world_size"]
        if "sharded" in saved:
            self._restore_sharded(path, saved, averager)
            return

        def of_rank(rank: int) -> State:
            state = self.sidecars.read(path, saved["sidecars"], rank) if "sidecars" in saved else saved["ranks"][rank]
            check_state(state, ())
            return state

        if "mean" not in saved and world == averager.world:
            state = of_rank(averager.rank)
        else:
            rank_zero_info(f"{averager.world} ranks start with the mean of the checkpoint's {world} states.")
            state = saved["mean"] if "mean" in saved else mean_state(map(of_rank, range(world)))
            check_state(state, ())
        memory = dict(state["memory"])
        self._accumulated = memory.pop("accumulated", {})
        if isinstance(averager, GradientAverager) and averager.shards:
            memory = own_memory(averager, memory)
        averager.load_state_dict({**state, "memory": memory})

    def _restore_sharded(self, path: Any, saved: State, averager: Saved) -> None:
        if not isinstance(averager, GradientAverager) or not averager.shards:
            what, allowed = "checkpoint of a sharded model", "one saved with save_distributed_checkpoint=False"
            raise refusal(what, "replicas' residuals in a folder", f"{allowed}, or checkpoint_state='drop'")
        if saved["world_size"] != averager.world:
            rank_zero_info(f"{averager.world} replicas start with the mean of {saved['world_size']} states.")
        load_sharded_state(averager, Path(path) / saved["sharded"])

    def put_back_accumulated(self, averager: GradientAverager) -> None:
        """Restore the gradients of an unfinished accumulation, which Lightning zeroes after loading."""
        averager.gradients.put_back(self._accumulated)
        self._accumulated = {}


def checked_header(saved: Any) -> State | None:
    """A checkpoint's entry under `KEY`, or None."""
    if saved is None:
        return None
    found = saved.get("format") if isinstance(saved, dict) else f"a {type(saved).__name__}"
    if found != FORMAT:
        allowed = f"{FORMAT}, as this version saves it; or checkpoint_state='drop'"
        raise refusal(f"checkpoint[{KEY!r}]['format']", found, allowed)
    return saved


def mean_optimizer_state(states: Sequence[State], averager: GradientAverager) -> OptimizerState:
    """The mean of the optimizer state in `states`, for a checkpoint as plain DDP writes it."""
    if not states:
        return {}
    moments: Mapping[str, str] = averager.state.moment_kinds
    means = mean_state({**state, "memory": {kind: state["memory"][kind] for kind in moments}} for state in states)
    return _by_parameter(means["memory"], averager)


def own_optimizer_state(averager: GradientAverager) -> OptimizerState:
    """Copies on the CPU of the optimizer state that this rank's averager keeps."""
    moments = averager.state.moment_kinds
    memory = averager.state_dict()["memory"] if moments else {}
    return _by_parameter({k: {n: part.cpu().clone() for n, part in memory[k].items()} for k in moments}, averager)


def _by_parameter(memory: Mapping[str, Mapping[str, torch.Tensor]], averager: GradientAverager) -> OptimizerState:
    moments, kept = averager.state.moment_kinds, {}
    for name, parameter in zip(averager.gradients.layout.names, averager.gradients.compressed, strict=True):
        parts = {moments[kind]: parts[name] for kind, parts in memory.items() if name in parts}
        if parts:
            kept[parameter] = parts
    return kept


def export_optimizer_state(kept: OptimizerState, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Write the state that the averager keeps into `state`, an optimizer's state_dict, as plain DDP has it."""
    for index, parameter in enumerate(parameters_of(optimizer)):
        if parameter in kept:  # in a new dict: those in a state_dict are the optimizer's own
            state["state"][index] = {**state["state"].get(index, {}), **kept[parameter]}


def _size(state: State, averager: Saved) -> int:
    """Bytes of a rank's state. It is the same on all ranks, though some may lack accumulated gradients."""
    memory = state["memory"]
    differ = ("accumulated", PARTITION)
    rest = (part.nbytes for kind, parts in memory.items() if kind not in differ for part in parts.values())
    return sum(rest) + averager.gradients.nbytes * sum(kind in memory for kind in differ)


def mean_over_ranks(state: State, averager: Any) -> State:
    """Like `mean_state`, but computed by all ranks. Collective."""
    memory = {kind: parts for kind, parts in state["memory"].items() if all_floating(parts)}
    mean: State = {kind: {} for kind in memory}
    for kind in sorted(memory):
        # Residuals have the same names on all ranks. Accumulated gradients and partitions may lack some.
        named = {name: part.shape for name, part in memory[kind].items()}
        shapes = averager.gradients.shapes if kind in ("accumulated", PARTITION) else named
        for name, shape in sorted(shapes.items()):
            part = memory[kind].get(name, torch.zeros(shape, dtype=torch.float32)).to(averager.gradients.device)
            [flat], [anywhere] = all_reduce_mean(averager.ranks, [part.reshape(-1)], [name in memory[kind]])
            if anywhere:
                mean[kind][name] = flat.view(shape).cpu() * (averager.ranks.workers if kind == PARTITION else 1)
    return {**state, "memory": mean, "workers": 1}


def name_of(averager: Saved) -> str:
    """The name of the averager's compressor. If its class is not registered, its base's, else the class's own."""
    names, cls = {entry.cls: entry.name for entry in entries()}, type(averager.compressor)
    return next((names[base] for base in cls.__mro__ if base in names), cls.__qualname__)
