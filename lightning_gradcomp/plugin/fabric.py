"""Compressed averaging for Lightning Fabric: `Fabric(strategy="dgc")`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
from lightning_gradcomp.averaging.trainable import has_stepped
from lightning_gradcomp.compressors import Compressor, LossyCompressor
from lightning_gradcomp.compressors.base import build
from lightning_gradcomp.errors import check_flag, refusal
from lightning_gradcomp.plugin.checkpoint_files import Sidecars, no_code, of_rank_zero
from lightning_gradcomp.plugin.ddp_hook import DDPHook, sent_if_they_differ
from lightning_gradcomp.plugin.manual_steps import ManualSteps
from lightning_gradcomp.plugin.rank_states import (
    KEY,
    OptimizerState,
    RankStates,
    checked_header,
    export_optimizer_state,
    mean_optimizer_state,
)
from lightning_gradcomp.plugin.validation import check_clipping_averages, check_ddp_options, corrected_optimizer


class SetUp:
    """A module that was set up in Fabric: its communication hook, its optimizers, and once it trains its averager."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp, self.manual_steps = ddp, ManualSteps()
        self.hook = DDPHook(ddp, self.manual_steps)
        self.optimizers: list[torch.optim.Optimizer] = []
        self.averager: GradientAverager | None = None
        self.loaded: tuple[dict[str, Any], Any] | None = None
        """The ranks' states from a checkpoint that was loaded before the averager existed, and the file's path."""

    def has_some_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if the optimizer steps some of the module's parameters."""
        return has_stepped(self.ddp, [optimizer])

    def versions(self) -> list[tuple[torch.Tensor | None, int]]:
        """Every parameter's gradient and torch's count of writes to it, which change if a backward computes some."""
        return [(p.grad, 0 if p.grad is None else p.grad._version) for p in self.ddp.parameters()]

    def took_part(self, before: list[tuple[torch.Tensor | None, int]]) -> bool:
        """True if a backward has computed gradients of this module since `before`, its `versions` then."""
        pairs = zip(before, self.versions(), strict=True)
        return any(grad is not now or count != count_now for (grad, count), (now, count_now) in pairs)


class CompressedFabricStrategy(DDPStrategy):
    """Data-parallel training in Fabric with compressed gradients.

        fabric = Fabric(strategy="dgc", devices=2)
        model, optimizer = fabric.setup(model, optimizer)
        for batch in loader:
            optimizer.zero_grad()
            with fabric.strategy.local_weights():  # for DGC; other methods do not need it
                fabric.backward(loss(model, batch))
            optimizer.step()

    After `fabric.backward`, `p.grad` is the average. If several optimizers train parameters of a module, an optimizer's
    step averages the gradients of its parameters instead; until then, in compressed steps, `p.grad` is the rank's own.
    The optimizer's pre-step hooks find the average, or update directions if DGC owns the momentum.
    `fabric.save` and `fabric.load` keep the ranks' residuals if `state` contains the optimizer.

    Each module that is set up with an optimizer has its own averager. DDP averages the gradients of a module without an
    optimizer, uncompressed.

    Args:
        compressor: a compressor, or its name.
        topology, inside, fallback, local_weights: as for `GradientAverager`, but with "auto" as default topology.
        steps_per_epoch: for a warm-up that counts epochs; or call `set_epoch`.
        timeout: how long a rank waits for the others before it raises an error.
        ddp_options: everything that Fabric's `DDPStrategy` takes.

    Raises:
        ValueError: if an option or an optimizer is not supported.
    """

    def __init__(
        self,
        compressor: Compressor | str = "dgc",
        topology: str = "auto",
        inside: str | None = None,
        fallback: str = "none",
        local_weights: bool = True,
        steps_per_epoch: int | None = None,
        timeout: timedelta = TIMEOUT,
        **ddp_options: Any,
    ) -> None:
        check_ddp_options("CompressedFabricStrategy", ddp_options)
        check_flag("CompressedFabricStrategy.local_weights", local_weights)
        super().__init__(timeout=timeout, **ddp_options)
        self.compressor: Compressor = build(compressor)
        resolve(topology, inside, self.compressor, fallback)  # checks them
        self._averager_options: dict[str, Any] = {
            "topology": topology,
            "inside": inside,
            "fallback": fallback,
            "local_weights": local_weights,
        }
        self.steps_per_epoch = steps_per_epoch
        self._epoch: int | None = None
        self._set_up: list[SetUp] = []
        self._in_step, self._grad_scale = False, 1.0
        self._kept: OptimizerState = {}
        """The optimizer state that the averagers keep, while a checkpoint is saved."""

    def __getstate__(self) -> dict[str, Any]:
        """For a copy of a module from `fabric.setup`, which refers to its strategy: without averagers and modules."""
        return {**vars(self), "_set_up": []}

    @property
    def averagers(self) -> list[GradientAverager]:
        """The averagers of the modules that train, in the order of their setup. The first backward creates them."""
        return [each.averager for each in self._set_up if each.averager is not None]

    @property
    def averager(self) -> GradientAverager | None:
        """The first of `averagers`."""
        return next(iter(self.averagers), None)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for the warm-up, at the start of each epoch."""
        self._epoch = epoch

    @contextmanager
    def local_weights(self) -> Iterator[None]:
        """`GradientAverager.local_weights` of all modules, for forward and backward if DGC corrects the momentum."""
        with ExitStack() as stack:
            for each in self._training:
                averager = self._averager(each)
                each.manual_steps.take_back(averager)
                stack.enter_context(averager.local_weights())
            yield

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        with sent_if_they_differ(module, self._ddp_kwargs):
            ddp = super().setup_module(module)
        self._set_up.append(SetUp(ddp))
        return ddp

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        name, owners = type(self.compressor).__name__, self._of(optimizer)
        if self.compressor.needs_optimizer and len(owners) > 1:
            raise refusal(f"modules of an optimizer with {name}", len(owners), "1")
        if not owners and (isinstance(self.compressor, LossyCompressor) or self.compressor.wire != "fp32"):
            rank_zero_warn(
                f"{type(optimizer).__name__} has no parameter of a module that is set up, so {name} does not compress "
                "its gradients. Set up the module first, or both together: fabric.setup(module, optimizer)."
            )
        for each in owners:
            if self.compressor.needs_optimizer and each.optimizers:
                raise refusal(f"optimizers of a module with {name}", "a second one", "one")
            each.optimizers.append(optimizer)
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):  # a wrapper of another optimizer may lack torch's hooks
            optimizer.register_step_pre_hook(self._check_averaged)
        return super().setup_optimizer(optimizer)

    @property
    def _training(self) -> list[SetUp]:
        """The modules with an optimizer."""
        return [each for each in self._set_up if each.optimizers]

    def _of(self, optimizer: torch.optim.Optimizer) -> list[SetUp]:
        """The modules that the optimizer steps."""
        return [each for each in self._set_up if each.has_some_of(optimizer)]

    def backward(self, tensor: torch.Tensor, module: torch.nn.Module | None, *args: Any, **kwargs: Any) -> None:
        training, scaler = self._training, getattr(self.precision, "scaler", None)
        self._grad_scale = scaler.get_scale() if scaler else 1.0
        for each in training:
            averager = self._averager(each)
            averager.epoch = self._epoch
            each.manual_steps.take_back(averager)
            each.hook.before_backward(averager, averager.begin_step(), self._grad_scale)
        before = [each.versions() for each in training]
        super().backward(tensor, module, *args, **kwargs)
        for each, versions in zip(training, before, strict=True):
            if each.took_part(versions):
                averager = self._averager(each)
                if turn := each.hook.after_backward(averager):
                    turn.average(averager, self._grad_scale)

    def optimizer_step(self, optimizer: Optimizable, **kwargs: Any) -> Any:
        """Average the gradients of the optimizer's parameters unless they are averaged, then step."""
        assert isinstance(optimizer, torch.optim.Optimizer)
        closure = kwargs.pop("closure", None)

        def closure_then_average() -> Any:
            result = closure()
            self._average_for(optimizer)
            return result

        if closure is None:
            self._average_for(optimizer)
        else:
            kwargs["closure"] = closure_then_average
        self._in_step = True
        try:
            result = super().optimizer_step(optimizer, **kwargs)
        finally:
            self._in_step = False
        if not hasattr(optimizer, "_optimizer_step_post_hooks"):
            for averager in self.averagers:
                averager.commit(optimizer)
        return result

    def _average_for(self, optimizer: torch.optim.Optimizer) -> None:
        """Average the gradients of the optimizer's parameters, unless no backward has changed them since."""
        for each in self._of(optimizer):
            averager = self._averager(each)
            if turn := each.manual_steps.before_step(averager, optimizer):
                turn.average(averager, self._grad_scale)

    def _check_averaged(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        if not self._in_step and any(each.manual_steps.is_pending(optimizer) for each in self._set_up):
            allowed = "the optimizer that fabric.setup returns, whose step averages the gradients first"
            raise refusal("optimizer", f"torch's own {type(optimizer).__name__}", allowed)

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
        for each in self._of(optimizer):
            check_clipping_averages(self.compressor, self._corrected(each), "in Fabric", "fabric.clip_gradients")
        self._average_for(optimizer)

    def get_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state. In a checkpoint it includes the momentum that the averager keeps, as in plain SGD."""
        state = super().get_optimizer_state(optimizer)
        export_optimizer_state(self._kept, optimizer, state)  # outside a save, the state may be one rank's own
        return state

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any | None = None, filter: Any | None = None
    ) -> None:
        """Like DDP's. For each optimizer in `state`, also saves all ranks' states of its modules.

        Their key is "lightning_gradcomp" if one module trains, otherwise that with the optimizer's key appended.
        """
        saved: dict[str, Any] = {}
        for key, each in self._keys(state).items():
            if each.averager is None and each.loaded is None:
                continue
            path = of_rank_zero(path)
            averager, entry = self._averager(each), {}  # with the loaded states, if no step was made since
            states = self._rank_states.put_into(entry, path, averager, each.hook.accumulating)
            saved[KEY if len(self._training) == 1 else key] = entry[KEY]
            self._kept |= mean_optimizer_state(states, averager)
        try:
            super().save_checkpoint(path, {**state, **saved}, storage_options, filter)
        finally:
            self._kept = {}
        self._rank_states.after_saving(list(saved.values()), path)

    def load_checkpoint(self, path: Any, state: Any | None = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Like DDP's. For each optimizer in `state`, also loads the ranks' states of its modules.

        Runs no code from the file unless weights_only=False is given.
        """
        with no_code(kwargs.get("weights_only")):
            rest = super().load_checkpoint(path, state, *args, **kwargs)
        keys = self._keys(state) if isinstance(state, dict) else {}
        for key, each in keys.items():
            saved = rest.pop(key, None)
            if saved is None and len(keys) == 1:
                saved = rest.pop(KEY, None)
            each.loaded = {KEY: checked_header(saved)}, path
            if each.averager is not None:
                if saved is None:
                    each.averager = None  # the next one starts without residuals
                self._restore(each, self._averager(each))
        loaded = state.values() if isinstance(state, dict) else [state]
        evaluates = any(each.ddp is value for each in self._set_up if not each.optimizers for value in loaded)
        if not evaluates and any(key.startswith(KEY) for key in rest):
            rank_zero_warn(
                "fabric.load: the checkpoint holds the ranks' residuals, which were not restored. "
                "To restore them, pass the optimizer: fabric.load(path, {'model': model, 'optimizer': optimizer})."
            )
        return rest

    def _keys(self, state: Mapping[str, Any]) -> dict[str, SetUp]:
        """The key in a checkpoint of every module that an optimizer in `state` steps."""
        found: dict[str, SetUp] = {}
        for name, optimizer in state.items():
            if isinstance(optimizer, torch.optim.Optimizer):
                new = [each for each in self._of(optimizer) if each not in found.values()]
                found |= {f"{KEY}.{name}" + (f".{i}" if i else ""): each for i, each in enumerate(new)}
        return found

    def _restore(self, each: SetUp, averager: GradientAverager) -> None:
        if each.loaded is not None:
            (checkpoint, path), each.loaded = each.loaded, None
            self._rank_states.restore(checkpoint, path, averager)
            self._rank_states.put_back_accumulated(averager)

    @cached_property
    def _rank_states(self) -> RankStates:
        return RankStates("auto", Sidecars(self.checkpoint_io), self.num_nodes)

    def _averager(self, each: SetUp) -> GradientAverager:
        if each.averager is None:
            each.averager = GradientAverager(
                each.ddp.module,
                self.compressor,
                optimizer=self._corrected(each),
                optimizers=each.optimizers,
                ranks_per_node=self.num_processes,
                **self._averager_options,
                steps_per_epoch=self.steps_per_epoch,
                epoch=self._epoch,
            )
            self._restore(each, each.averager)
        each.averager.use_optimizers(self._corrected(each), each.optimizers)  # more may have been set up since
        return each.averager

    def _corrected(self, each: SetUp) -> torch.optim.Optimizer | None:
        return corrected_optimizer(self.compressor, each.optimizers, automatic=False)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: compressors register the names. The inherited method would override "ddp"."""
