"""Compressed averaging for Lightning Fabric: `Fabric(strategy="dgc")`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities import rank_zero_warn
from lightning.fabric.utilities.types import Optimizable
from torch.nn.parallel import DistributedDataParallel

from lightning_gradcomp.averaging import GradientAverager
from lightning_gradcomp.averaging.faults import TIMEOUT
from lightning_gradcomp.averaging.topology import resolve
from lightning_gradcomp.compressors import Compressor
from lightning_gradcomp.compressors.base import build
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.plugin.checkpoint_files import Sidecars, no_code, of_rank_zero
from lightning_gradcomp.plugin.ddp_hook import DDPHook, sent_if_they_differ
from lightning_gradcomp.plugin.rank_states import (
    KEY,
    OptimizerState,
    RankStates,
    export_optimizer_state,
    mean_optimizer_state,
)
from lightning_gradcomp.plugin.validation import check_clipping_averages, corrected_optimizer


class CompressedFabricStrategy(DDPStrategy):
    """Data-parallel training in Fabric with compressed gradients. Supports one module, set up with its optimizer.

        fabric = Fabric(strategy="dgc", devices=2)
        model, optimizer = fabric.setup(model, optimizer)
        for batch in loader:
            optimizer.zero_grad()
            with fabric.strategy.local_weights():  # for DGC; other methods do not need it
                fabric.backward(loss(model, batch))
            optimizer.step()

    An optimizer's step averages the gradients of its parameters. Until then, in compressed steps, `p.grad` is the
    rank's own. `fabric.save` and `fabric.load` keep the ranks' residuals if `state` contains the optimizer.

    Args:
        compressor: a compressor, or its name.
        topology: as in `CompressedDDPStrategy`.
        inside: as in `CompressedDDPStrategy`.
        residual_device: as in `CompressedDDPStrategy`.
        fallback: as in `CompressedDDPStrategy`.
        local_weights: False: `local_weights()` has no effect.
        steps_per_epoch: for a warm-up that counts epochs; or call `set_epoch`.
        timeout: how long a rank waits for the others before it raises an error.
        ddp_options: everything that Fabric's `DDPStrategy` takes.

    Raises:
        ValueError: if an option or an optimizer is not supported, or for a second module.
    """

    def __init__(
        self,
        compressor: Compressor | str = "dgc",
        topology: str = "auto",
        inside: str | None = None,
        residual_device: str | None = None,
        fallback: str = "none",
        local_weights: bool = True,
        steps_per_epoch: int | None = None,
        timeout: timedelta = TIMEOUT,
        **ddp_options: Any,
    ) -> None:
        super().__init__(timeout=timeout, **ddp_options)
        self.compressor: Compressor = build(compressor)
        resolve(topology, inside, residual_device, self.compressor, fallback)  # checks them
        self._averager_options: dict[str, Any] = {
            "topology": topology,
            "inside": inside,
            "residual_device": residual_device,
            "fallback": fallback,
            "local_weights": local_weights,
        }
        self.steps_per_epoch = steps_per_epoch
        self.averager: GradientAverager | None = None
        """Created at the first backward, when module and optimizer are known."""
        self._epoch: int | None = None
        self._ddp: DistributedDataParallel | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._loaded: tuple[dict[str, Any], Any] | None = None
        """The ranks' states from a checkpoint that was loaded before the averager existed, and the file's path."""
        self._kept: OptimizerState = {}
        """The optimizer state that the averager keeps, while a checkpoint is saved."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for the warm-up, at the start of each epoch."""
        self._epoch = epoch

    def local_weights(self) -> AbstractContextManager[None]:
        """`GradientAverager.local_weights`, for forward and backward if DGC corrects the momentum."""
        return self._averager().local_weights()

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        if self._ddp is not None:
            raise refusal("modules set up with CompressedFabricStrategy", "a second one", "one")
        with sent_if_they_differ(module, self._ddp_kwargs):
            self._ddp = super().setup_module(module)
        self._hook = DDPHook(self._ddp, at_optimizer_step=True)
        return self._ddp

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if self.compressor.needs_optimizer and self._optimizers:
            raise refusal(f"optimizers with {type(self.compressor).__name__}", "a second one", "one")
        self._optimizers.append(optimizer)
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):  # a wrapper of another optimizer may lack torch's hooks
            optimizer.register_step_pre_hook(self._check_averaged)
        return super().setup_optimizer(optimizer)

    def backward(self, tensor: torch.Tensor, module: torch.nn.Module | None, *args: Any, **kwargs: Any) -> None:
        averager = self._averager()
        averager.epoch = self._epoch
        self._hook.before_backward(averager, averager.begin_step(), self.precision)
        super().backward(tensor, module, *args, **kwargs)
        self._hook.after_backward(averager)

    def optimizer_step(self, optimizer: Optimizable, **kwargs: Any) -> Any:
        """Average the gradients of the optimizer's parameters, then step."""
        assert isinstance(optimizer, torch.optim.Optimizer)
        averager, closure = self._averager(), kwargs.pop("closure", None)

        def closure_then_average() -> Any:
            result = closure()
            self._hook.before_optimizer_step(averager, optimizer)
            return result

        if closure is None:
            self._hook.before_optimizer_step(averager, optimizer)
        else:
            kwargs["closure"] = closure_then_average
        with self._hook.stepping():
            result = super().optimizer_step(optimizer, **kwargs)
        if not hasattr(optimizer, "_optimizer_step_post_hooks"):
            averager.commit(optimizer)
        return result

    def _check_averaged(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        allowed = "the optimizer that fabric.setup returns, whose step averages the gradients first"
        self._hook.check_averaged(optimizer, "optimizer", allowed)

    def clip_gradients_norm(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, *args: Any, **kw: Any
    ) -> Any:
        """Clip the average by norm. Raises ValueError if the compressor owns the momentum."""
        self._average_to_clip(optimizer)
        return super().clip_gradients_norm(module, optimizer, *args, **kw)

    def clip_gradients_value(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, *args: Any, **kw: Any
    ) -> Any:
        """Clip the average by value. Raises ValueError if the compressor owns the momentum."""
        self._average_to_clip(optimizer)
        return super().clip_gradients_value(module, optimizer, *args, **kw)

    def _average_to_clip(self, optimizer: torch.optim.Optimizer) -> None:
        check_clipping_averages(self.compressor, self._corrected, "in Fabric", "fabric.clip_gradients")
        self._hook.before_optimizer_step(self._averager(), optimizer)

    def get_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state. In a checkpoint it includes the momentum that the averager keeps, as in plain SGD."""
        state = super().get_optimizer_state(optimizer)
        export_optimizer_state(self._kept, optimizer, state)  # outside a save, the state may be one rank's own
        return state

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any | None = None, filter: Any | None = None
    ) -> None:
        """Like DDP's. With an optimizer in `state`, also saves all ranks' states under the key "lightning_gradcomp"."""
        saved: dict[str, Any] = {}
        if _has_optimizer(state) and (self.averager is not None or self._loaded is not None):
            path = of_rank_zero(path)
            averager = self._averager()  # with the loaded states, if no step was made since
            states = self._rank_states.put_into(saved, path, averager, self._hook.accumulating)
            self._kept = mean_optimizer_state(states, averager)
        try:
            super().save_checkpoint(path, {**state, **saved}, storage_options, filter)
        finally:
            self._kept = {}
        self._rank_states.after_saving(saved, path)

    def load_checkpoint(self, path: Any, state: Any | None = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Like DDP's. With an optimizer in `state`, also loads the ranks' states.

        Runs no code from the file unless weights_only=False is given.

        Raises:
            ValueError: if a state does not fit the model.
        """
        with no_code(kwargs.get("weights_only")):
            rest = super().load_checkpoint(path, state, *args, **kwargs)
        if isinstance(state, dict) and _has_optimizer(state):
            self._loaded = {KEY: rest.pop(KEY, None)}, path
            if self.averager is not None:
                if self._loaded[0][KEY] is None:
                    self.averager = None  # the next one starts without residuals
                self._restore(self._averager())
        elif KEY in rest:
            rank_zero_warn(
                "fabric.load: the checkpoint holds the ranks' residuals, which were not restored. "
                "To restore them, pass the optimizer: fabric.load(path, {'model': model, 'optimizer': optimizer})."
            )
        return rest

    def _restore(self, averager: GradientAverager) -> None:
        if self._loaded is not None:
            (checkpoint, path), self._loaded = self._loaded, None
            self._rank_states.restore(checkpoint, path, averager)
            self._rank_states.put_back_accumulated(averager)

    @cached_property
    def _rank_states(self) -> RankStates:
        return RankStates("auto", Sidecars(self.checkpoint_io), self.num_nodes)

    def _averager(self) -> GradientAverager:
        if self.averager is None:
            assert self._ddp is not None
            self.averager = GradientAverager(
                self._ddp.module,
                self.compressor,
                optimizer=self._corrected,
                optimizers=self._optimizers,
                ranks_per_node=self.num_processes,
                **self._averager_options,
                steps_per_epoch=self.steps_per_epoch,
                epoch=self._epoch,
            )
            self._restore(self.averager)
        self.averager.use_optimizers(self._corrected, self._optimizers)  # more may have been set up since
        return self.averager

    @property
    def _corrected(self) -> torch.optim.Optimizer | None:
        return corrected_optimizer(self.compressor, self._optimizers, automatic=False)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: compressors register the names. The inherited method would override "ddp"."""


def _has_optimizer(state: dict[str, Any]) -> bool:
    return any(isinstance(value, torch.optim.Optimizer) for value in state.values())
