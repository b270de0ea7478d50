"""The states of all ranks' averagers in a checkpoint: how they are saved, and how each rank gets its own back.

Under the key "lightning_gradcomp" are the compressor's name, the number of ranks, and one of

    ranks: [state of rank 0, ...]        gather: everything in one file
    sidecars: "name of a folder"         sidecar: a file for each rank, in a folder beside the checkpoint
    mean: state                          mean: one copy, whatever the number of ranks
    sharded: "name of a folder"          of a sharded model: a folder in the distributed checkpoint
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
from lightning_gradcomp.errors import is_whole, refusal
from lightning_gradcomp.plugin.checkpoint_files import Sidecars, of_rank_zero
from lightning_gradcomp.registry import entries

KEY = "lightning_gradcomp"
FORMAT = 1
GATHER_LIMIT = 2**30
"""Bytes of all ranks' states up to which "auto" gathers them into one file, which every rank reads in full."""

once = WarningCache()
"""Says a thing once."""

State = dict[str, Any]
OptimizerState = dict[torch.nn.Parameter, dict[str, torch.Tensor]]
"""Parameter -> torch's name -> tensor, of what an optimizer has without compression, and averagers keep."""


def interrupted(module: LightningModule) -> bool:
    """Whether an interruption has ended the fit, which may have hit this rank alone.

    A SIGTERM is none: it ends all ranks after the same step (plugin/sigterm.py).
    """
    return module.trainer.state.status == TrainerStatus.INTERRUPTED and not module.trainer.received_sigterm


def all_ranks_present(module: LightningModule | None) -> bool:
    """Whether all ranks are here to gather: not after an interruption, of which this warns."""
    if module is None:
        return False
    if interrupted(module):
        rank_zero_warn("Interrupted: this checkpoint holds the model, without what the ranks had not sent yet.")
        return False
    return True


def rank_state(averager: GradientAverager, accumulating: bool) -> State:
    """This rank's state, on the CPU; in the midst of an accumulation with the gradients accumulated so far."""
    state = averager.state_dict()
    memory = {kind: {name: part.cpu() for name, part in parts.items()} for kind, parts in state["memory"].items()}
    if accumulating:
        memory["accumulated"] = {name: part.cpu() for name, part in averager.gradients.local().items()}
    return {**state, "memory": memory}


class RankStates:
    """Saves the states of all ranks in checkpoints, and restores them.

    Args:
        mode: `checkpoint_state` of the strategy.
        sidecars: the files beside checkpoints.
        nodes: on how many the ranks are.
    """

    def __init__(self, mode: str, sidecars: Sidecars, nodes: int) -> None:
        self.mode, self.sidecars, self.nodes = mode, sidecars, nodes
        self._removed: list[Any] = []
        """Paths of checkpoints that rank 0 has removed, and the others don't know of."""
        self._accumulated: dict[str, torch.Tensor] = {}

    def put_into(self, checkpoint: State, path: Any, averager: GradientAverager, accumulating: bool) -> list[State]:
        """Add all ranks' states to rank 0's `checkpoint`, or write them beside `path`. A collective call.

        Returns, on rank 0, which writes the optimizer's state, the states that it has then: all ranks', their mean, or
        its own. Others return none.
        """
        state = rank_state(averager, accumulating)
        mode = self.mode
        if mode == "auto":  # a rank that has rested in all rounds so far has less than others
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
        return states if averager.ranks.rank == 0 else []

    def _chosen(self, total: int) -> str:
        """Where "auto" puts `total` bytes: in sidecars, if gathering them would load a network or rank 0's memory."""
        if total <= (GATHER_LIMIT if self.nodes == 1 else 0) or not self.sidecars.possible:
            return "gather"
        once.info("What the ranks have not sent is saved in files of their own, in folders beside the checkpoints.")
        return "sidecar"

    def after_saving(self, checkpoint: State, path: Any) -> None:
        """Rank 0 has written the checkpoint: remove the sidecars of an earlier one. Collective where it has any."""
        keep = checkpoint.get(KEY, {}).get("sidecars")
        if keep is not None:
            dist.barrier()  # until the checkpoint is complete, the earlier one is what there is
        if keep is not None or not dist.is_initialized() or dist.get_rank() == 0:
            self.sidecars.remove_old(path, keep)

    def after_removing(self, path: Any) -> None:
        """Rank 0 has removed the checkpoint: it removes the sidecars too.

        Other ranks, which are asked to remove the checkpoint that is the worst by a metric of their own, do nothing.
        """
        if not dist.is_initialized() or dist.get_rank() == 0:
            self.sidecars.remove_old(path, keep=None)
            self._removed.append(path)

    def remove_on_every_disk(self) -> None:
        """Remove the sidecars of what rank 0 has removed, on the disks of other nodes too. A collective call."""
        for path in of_rank_zero(self._removed):
            self.sidecars.remove_old(path, keep=None)
        self._removed = []

    def restore(self, checkpoint: Mapping[str, Any], path: Any, averager: GradientAverager) -> None:
        """Load this rank's state into `averager`; the mean of all ranks' where their number has changed.

        Raises:
            ValueError: a state that can't be read, or doesn't fit the model.
        """
        saved = None if self.mode == "drop" else checked_header(checkpoint.get(KEY))
        if saved is None or saved["compressor"] != name_of(averager):
            held = "nothing that ranks remember" if saved is None else f"what {saved['compressor']!r} remembers"
            why = "checkpoint_state='drop'" if self.mode == "drop" else f"the checkpoint holds {held}"
            rank_zero_info(f"{why}: {name_of(averager)} starts with nothing remembered.")
            return
        world = saved["world_size"]
        if "sharded" in saved:
            self._restore_sharded(path, saved, averager)
            return

        def of_rank(rank: int) -> State:
            state = self.sidecars.read(path, saved["sidecars"], rank) if "sidecars" in saved else saved["ranks"][rank]
            if isinstance(averager, GradientAverager):  # a worker of `dist_async` remembers less
                check_state(state, ())
            return state

        if "mean" not in saved and world == averager.world:
            state = of_rank(averager.ranks.rank)
        else:
            rank_zero_info(f"{averager.world} ranks start with the mean of what the checkpoint's {world} remembered.")
            state = saved["mean"] if "mean" in saved else mean_state(map(of_rank, range(world)))
            check_state(state, ())
        memory = dict(state["memory"])
        self._accumulated = memory.pop("accumulated", {})
        memory = own_memory(averager, memory) if averager.shards else memory
        averager.load_state_dict({**state, "memory": memory})

    def _restore_sharded(self, path: Any, saved: State, averager: GradientAverager) -> None:
        if not averager.shards:
            what, allowed = "checkpoint of a sharded model", "one saved with save_distributed_checkpoint=False"
            raise refusal(what, "what replicas remember in a folder", f"{allowed}, or checkpoint_state='drop'")
        if saved["world_size"] != averager.world:
            rank_zero_info(f"{averager.world} replicas start with the mean of what {saved['world_size']} remembered.")
        load_sharded_state(averager, Path(path) / saved["sharded"])

    def put_back_accumulated(self, averager: GradientAverager) -> None:
        """Set the gradients of an unfinished accumulation, which Lightning zeroes after restoring."""
        averager.gradients.put_back(self._accumulated)
        self._accumulated = {}


def checked_header(saved: Any) -> State | None:
    """What a checkpoint has under `KEY`, None if that is nothing.

    Raises:
        ValueError: an entry that is missing, or of another type than `RankStates.put_into` writes.
    """
    if saved is None:
        return None
    what = f"checkpoint[{KEY!r}]"
    if not isinstance(saved, dict):
        raise refusal(what, f"a {type(saved).__name__}", "a dict, as a checkpoint has it; or checkpoint_state='drop'")
    if saved.get("format") != FORMAT:
        raise refusal(f"{what}['format']", saved.get("format"), str(FORMAT))
    if not isinstance(saved.get("compressor"), str):
        raise refusal(f"{what}['compressor']", saved.get("compressor"), "a compressor's name")
    world: Any = saved.get("world_size")
    if not is_whole(world) or world < 1:
        raise refusal(f"{what}['world_size']", world, "a whole number from 1")
    types = {"ranks": list, "sidecars": str, "mean": dict, "sharded": str}
    held = [key for key, expected in types.items() if isinstance(saved.get(key), expected)]
    if len(held) != 1 or len(saved.get("ranks", range(world))) != world:
        got = ", ".join(f"{key!r}: a {type(saved[key]).__name__}" for key in types if key in saved) or "none of these"
        raise refusal(what, got, f"one of {', '.join(types)}: a list of {world} states, a name, a state, a name")
    return saved


def mean_optimizer_state(states: Sequence[State], averager: GradientAverager) -> OptimizerState:
    """The mean of what `states` hold of the optimizer's state, for a checkpoint as plain DDP has it."""
    if not states:
        return {}
    moments: Mapping[str, str] = averager.state.update.moments if averager.state else {}
    means = mean_state({**state, "memory": {kind: state["memory"][kind] for kind in moments}} for state in states)
    kept: OptimizerState = {}
    for name, parameter in zip(averager.gradients.layout.names, averager.gradients.compressed, strict=True):
        parts = {moments[kind]: parts[name] for kind, parts in means["memory"].items() if name in parts}
        if parts:
            kept[parameter] = parts
    return kept


def export_optimizer_state(kept: OptimizerState, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Write what is kept in the averager into `state` (an optimizer's state_dict), as plain DDP has it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        if parameter in kept:  # in a dict of its own: those in a state_dict are the optimizer's
            state["state"][index] = {**state["state"].get(index, {}), **kept[parameter]}


def _size(state: State, averager: GradientAverager) -> int:
    """Bytes of a rank's state; the same on all, though an accumulation may lack gradients on some."""
    memory = state["memory"]
    differ = ("accumulated", PARTITION)
    rest = (part.nbytes for kind, parts in memory.items() if kind not in differ for part in parts.values())
    return sum(rest) + averager.gradients.nbytes * sum(kind in memory for kind in differ)


def mean_over_ranks(state: State, averager: GradientAverager) -> State:
    """As `mean_state`, made by all ranks together."""
    memory = {kind: parts for kind, parts in state["memory"].items() if all_floating(parts)}
    mean: State = {kind: {} for kind in memory}
    for kind in sorted(memory):
        # A residual has the same names on all ranks; accumulated gradients, and shards, may lack some on some.
        named = {name: part.shape for name, part in memory[kind].items()}
        shapes = averager.gradients.shapes if kind in ("accumulated", PARTITION) else named
        for name, shape in sorted(shapes.items()):
            part = memory[kind].get(name, torch.zeros(shape, dtype=torch.float32)).to(averager.gradients.device)
            [flat], [anywhere] = all_reduce_mean(averager.ranks, [part.reshape(-1)], [name in memory[kind]])
            if anywhere:
                mean[kind][name] = flat.view(shape).cpu() * (averager.ranks.workers if kind == PARTITION else 1)
    return {**state, "memory": mean, "workers": 1}


def name_of(averager: GradientAverager) -> str:
    """The name of the averager's compressor; that of its base, for a class which is not registered."""
    names = {entry.cls: entry.name for entry in entries()}
    return next(names[cls] for cls in type(averager.compressor).__mro__ if cls in names)
