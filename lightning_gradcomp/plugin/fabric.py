"""The same averaging for Lightning Fabric: `Fabric(strategy="dgc")`."""

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
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.plugin.checkpoint_files import Sidecars, no_code, of_rank_zero
from lightning_gradcomp.plugin.ddp_hook import DDPHook
from lightning_gradcomp.plugin.initial_weights import sent_if_they_differ
from lightning_gradcomp.plugin.rank_states import (
    KEY,
    OptimizerState,
    RankStates,
    export_optimizer_state,
    mean_optimizer_state,
)
from lightning_gradcomp.plugin.validation import corrected
from lightning_gradcomp.registry import build


class CompressedFabricStrategy(DDPStrategy):
    """Data-parallel training in Fabric whose gradients travel compressed. One module, set up with its optimizer.

        fabric = Fabric(strategy="dgc", devices=2)
        model, optimizer = fabric.setup(model, optimizer)
        for batch in loader:
            optimizer.zero_grad()
            with fabric.strategy.local_weights():  # of DGC; other methods need no such line
                fabric.backward(loss(model, batch))
            optimizer.step()

    Gradients are averaged when the optimizer steps, those of its parameters; until then `p.grad` is the rank's own in
    compressed steps. `fabric.save` and `fabric.load`, with the optimizer in `state`, keep what the ranks had not sent.

    Args:
        compressor: a compressor, or its name.
        topology: as in `CompressedDDPStrategy`.
        inside: likewise.
        residual_device: likewise.
        local_weights: False: `local_weights()` has no effect.
        steps_per_epoch: lets a warm-up that counts epochs count them; else call `set_epoch`.
        timeout: how long a rank waits for the others, anywhere; then it ends with an error.
        ddp_options: everything that Fabric's `DDPStrategy` takes.

    Raises:
        ValueError: an option, a second module or an optimizer that can't be honoured.
    """

    def __init__(
        self,
        compressor: Compressor | str = "dgc",
        topology: str = "auto",
        inside: str | None = None,
        residual_device: str | None = None,
        local_weights: bool = True,
        steps_per_epoch: int | None = None,
        timeout: timedelta = TIMEOUT,
        **ddp_options: Any,
    ) -> None:
        super().__init__(timeout=timeout, **ddp_options)
        self.compressor: Compressor = build(compressor)
        resolve(topology, inside, residual_device, self.compressor)  # raises
        self._averager_options: dict[str, Any] = {
            "topology": topology,
            "inside": inside,
            "residual_device": residual_device,
            "local_weights": local_weights,
        }
        self.steps_per_epoch = steps_per_epoch
        self.averager: GradientAverager | None = None
        """Made at the first backward, when module and optimizer are known."""
        self._epoch: int | None = None
        self._ddp: DistributedDataParallel | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._loaded: tuple[dict[str, Any], Any] | None = None
        """The ranks' states of a checkpoint that was loaded before there was an averager; and the file's path."""
        self._steps_itself = False
        self._kept: OptimizerState = {}
        """While a checkpoint is saved: what the averager keeps of the optimizer's state, for it."""

    def set_epoch(self, epoch: int) -> None:
        """Tell the warm-up which epoch begins."""
        self._epoch = epoch

    def local_weights(self) -> AbstractContextManager[None]:
        """`GradientAverager.local_weights`: around forward and backward, where DGC corrects the momentum."""
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
        self._hook.before_backward(averager, self.precision)
        super().backward(tensor, module, *args, **kwargs)
        self._hook.after_backward(averager)

    def optimizer_step(self, optimizer: Optimizable, **kwargs: Any) -> Any:
        """Average the gradients of the optimizer's parameters; then step."""
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
        self._steps_itself = True
        try:
            result = super().optimizer_step(optimizer, **kwargs)
        finally:
            self._steps_itself = False
        if not hasattr(optimizer, "_optimizer_step_post_hooks"):
            averager.commit(optimizer)
        return result

    def _check_averaged(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        """Before any step of an optimizer: `optimizer_step`, which averages its gradients, must have called it."""
        if not self._steps_itself and self._hook.pending(optimizer):
            allowed = "what fabric.setup returns for it, whose step averages the gradients first"
            raise refusal("optimizer", f"torch's own {type(optimizer).__name__}", allowed)

    def clip_gradients_norm(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, *args: Any, **kw: Any
    ) -> Any:
        """Clip the average by norm.

        Raises:
            ValueError: a compressor that owns the momentum: what is cut off the average has left the memory.
        """
        self._average_to_clip(optimizer)
        return super().clip_gradients_norm(module, optimizer, *args, **kw)

    def clip_gradients_value(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, *args: Any, **kw: Any
    ) -> Any:
        """Clip the average by value. Raises as `clip_gradients_norm`."""
        self._average_to_clip(optimizer)
        return super().clip_gradients_value(module, optimizer, *args, **kw)

    def _average_to_clip(self, optimizer: torch.optim.Optimizer) -> None:
        name = type(self.compressor).__name__
        if self.compressor.state_for(corrected(self.compressor, self._optimizers, automatic=False)).owns_momentum:
            allowed = f"{name}(clip_norm=...), which clips each rank's gradient before it is accumulated"
            raise refusal(f"clipping with {name}", "fabric.clip_gradients", allowed)
        self._hook.before_optimizer_step(self._averager(), optimizer)

    def get_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state; in a checkpoint with the momentum that the averager keeps, where plain SGD has it."""
        state = super().get_optimizer_state(optimizer)
        export_optimizer_state(self._kept, optimizer, state)  # by itself, `optimizer.state_dict()` may be one rank's
        return state

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any | None = None, filter: Any | None = None
    ) -> None:
        """As DDP's; beside an optimizer also the states of all ranks, under the key "lightning_gradcomp"."""
        saved: dict[str, Any] = {}
        if _has_optimizer(state) and (self.averager is not None or self._loaded is not None):
            path = of_rank_zero(path)
            averager = self._averager()  # with what was loaded, if no step was made since
            states = self._rank_states.put_into(saved, path, averager, self._hook.accumulating)
            self._kept = mean_optimizer_state(states, averager)
        try:
            super().save_checkpoint(path, {**state, **saved}, storage_options, filter)
        finally:
            self._kept = {}
        self._rank_states.after_saving(saved, path)

    def load_checkpoint(self, path: Any, state: Any | None = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As DDP's. Into an optimizer, the states of the ranks are loaded, too. Runs no code from the file, unless
        weights_only=False is given.

        Raises:
            ValueError: a state that doesn't fit the model.
        """
        with no_code(kwargs.get("weights_only")):
            rest = super().load_checkpoint(path, state, *args, **kwargs)
        if isinstance(state, dict) and _has_optimizer(state):
            self._loaded = {KEY: rest.pop(KEY, None)}, path
            if self.averager is not None:
                if self._loaded[0][KEY] is None:
                    self.averager = None  # a new one: nothing that this one remembers stays
                self._restore(self._averager())
        elif KEY in rest:
            rank_zero_warn(
                "fabric.load: what the ranks had not sent yet is in the checkpoint, and was not restored. "
                "That needs the optimizer: fabric.load(path, {'model': model, 'optimizer': optimizer})."
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
                optimizer=corrected(self.compressor, self._optimizers, automatic=False),
                optimizers=self._optimizers,
                ranks_per_node=self.num_processes,
                **self._averager_options,
                steps_per_epoch=self.steps_per_epoch,
                epoch=self._epoch,
            )
            self._restore(self.averager)
        optimizer = corrected(self.compressor, self._optimizers, automatic=False)
        self.averager.use_optimizers(optimizer, self._optimizers)  # another may have been set up since
        return self.averager

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: names come from the registry of compressors. (Inherited, it would claim "ddp" again.)"""


def _has_optimizer(state: dict[str, Any]) -> bool:
    return any(isinstance(value, torch.optim.Optimizer) for value in state.values())
