"""CompressedDDPStrategy: DDP with another way to average gradients.

DDP wraps the model as always; a switch in its communication hook lets it average dense steps only. Compressed steps
are averaged after backward, before Lightning's `on_after_backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.nn.parallel import DistributedDataParallel

from lightning_gradcomp.averaging import GradientAverager
from lightning_gradcomp.averaging.topologies import topology as named_topology
from lightning_gradcomp.compressors import Compressor
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.plugin import launch
from lightning_gradcomp.plugin.checkpoint import KEY, MODES, export_momentum, in_step, pack, rank_state, restore
from lightning_gradcomp.plugin.ddp_switch import DDPSwitch
from lightning_gradcomp.plugin.reading import read
from lightning_gradcomp.plugin.refusals import check_clipping, check_optimizers
from lightning_gradcomp.plugin.sidecar import Sidecars
from lightning_gradcomp.registry import build

TAKEN_OPTIONS = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")
"""Options of DDPStrategy that say how gradients are averaged: that is this strategy's part."""


class CompressedDDPStrategy(DDPStrategy):
    """Data-parallel training whose gradients travel compressed.

        Trainer(strategy=CompressedDDPStrategy(compressor=DGC(sparsity=0.999)), devices=2)

    Args:
        compressor: a compressor, or its name.
        topology: "auto" or "all_gather".
        checkpoint_state: what becomes of what the ranks have not sent yet. "gather": all of it in the checkpoint, up to
            1 GiB, beyond that as "sidecar". "sidecar": a file for each rank, in a folder beside the checkpoint. "mean":
            one copy of the mean over ranks, with which a resumed run is no longer exact. "drop": nothing is saved, or
            restored.
        ddp_options: everything that `DDPStrategy` takes, except the options that say how gradients are averaged.

    Raises:
        ValueError: an option, a Trainer feature or an optimizer that can't be honoured, before training starts.
    """

    def __init__(
        self,
        compressor: Compressor | str = "dgc",
        topology: str = "auto",
        checkpoint_state: str = "gather",
        **ddp_options: Any,
    ) -> None:
        for option in TAKEN_OPTIONS:
            if ddp_options.get(option) is not None:
                raise refusal(f"CompressedDDPStrategy.{option}", ddp_options[option], "None: the compressor averages")
        if checkpoint_state not in MODES:
            raise refusal("checkpoint_state", checkpoint_state, ", ".join(repr(mode) for mode in MODES))
        super().__init__(**ddp_options)
        self.checkpoint_state = checkpoint_state
        self.compressor: Compressor = build(compressor)
        named_topology(topology, None)
        self.topology = topology
        self.averager: GradientAverager | None = None
        """Set while fitting."""

    def _configure_launcher(self) -> None:
        if self._start_method == "popen":
            processes = self.cluster_environment, self.num_processes, self.num_nodes
            self._launcher = launch.SubprocessLauncher(self.check, *processes)
        else:
            self._launcher = launch.MultiProcessingLauncher(self.check, self, start_method=self._start_method)

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        """Refuse what can't be honoured, before other processes are started."""
        check_clipping(self.compressor, trainer, module)
        check_optimizers(self.compressor, launch.optimizers_of(module))
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "check_strategy"):
                callback.check_strategy(self)

    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self._switch = DDPSwitch(self.model)

    def setup(self, trainer: Trainer) -> None:
        self.averager = None
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        assert self.lightning_module is not None
        check_optimizers(self.compressor, self.optimizers)
        self.averager = GradientAverager(
            self.lightning_module,
            self.compressor,
            optimizer=self.optimizers[0] if self.compressor.owns_momentum else None,
            topology=self.topology,
            epoch=trainer.current_epoch,
        )
        rank_zero_info(self.averager.describe())

    def backward(
        self, closure_loss: torch.Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """As `Strategy.backward`, with the averaging before the hooks that look at the gradients."""
        module, precision, averager = self.lightning_module, self.precision_plugin, self.averager
        assert module is not None and averager is not None
        averager.epoch = module.current_epoch
        self._switch.before_backward(averager, precision)
        self.pre_backward(closure_loss)
        closure_loss = precision.pre_backward(closure_loss, module)
        precision.backward(closure_loss, module, optimizer, *args, **kwargs)
        self.post_backward(closure_loss)
        self._switch.after_backward(averager)
        return precision.post_backward(closure_loss, module)

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """As DDP's; between the closure, which averages, and the end of the step, the momentum is taken over."""
        assert self.averager is not None
        averager = self.averager
        with ExitStack() as until_the_end_of_the_step:

            def closure_then_take_over() -> Any:
                result = closure()
                until_the_end_of_the_step.enter_context(averager.taken_over(optimizer))
                return result

            return super().optimizer_step(optimizer, closure_then_take_over, model, **kwargs)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state as plain DDP would have it: with the momentum that is kept elsewhere meanwhile."""
        state = super().optimizer_state(optimizer)
        if self.averager is not None and in_step(self.lightning_module):
            export_momentum(self.averager, optimizer, state)
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """As DDP's, with what the ranks remember; a checkpoint of weights alone has none of it."""
        whole = "optimizer_states" in checkpoint and self.averager is not None and in_step(self.lightning_module)
        if whole and self.checkpoint_state != "drop":
            assert self.averager is not None
            state = rank_state(self.averager, self._switch.accumulating)
            checkpoint[KEY] = pack(state, self.averager, self.checkpoint_state, partial(self._write_sidecar, filepath))
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.is_global_zero:
            self.sidecars.remove_old(filepath, checkpoint.get(KEY, {}).get("sidecars"))

    def _write_sidecar(self, filepath: Any, state: dict[str, Any]) -> str:
        name = self.sidecars.write(state, filepath, self.broadcast(self.sidecars.token()), self.global_rank)
        self.barrier("sidecars")  # the checkpoint that names them comes after them
        return name

    @cached_property
    def sidecars(self) -> Sidecars:
        """The files beside checkpoints."""
        return Sidecars(self.checkpoint_io)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            self.sidecars.remove_old(filepath, None)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As `Strategy.load_checkpoint`.

        Raises:
            ValueError: a file that is not a whole checkpoint.
        """
        self._loaded_from = checkpoint_path
        load = partial(super().load_checkpoint, *args, **kwargs)
        return read(load, checkpoint_path, "checkpoint", "state_dict", "a file that Lightning saved, whole")

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        assert self.averager is not None
        restore(self.averager, checkpoint, self.checkpoint_state, partial(self.sidecars.read, self._loaded_from))

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: names come from the registry of compressors. (Inherited, it would claim "ddp" again.)"""
