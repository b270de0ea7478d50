"""CompressedDDPStrategy: DDP with another way to average gradients.

DDP wraps the model, and its communication hook (plugin/ddp_hook.py) averages dense steps only. Compressed steps are
averaged by the `GradientAverager`: after backward, before Lightning's `on_after_backward`; in manual optimization when
the optimizer steps, before Lightning's `on_before_optimizer_step`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.nn.parallel import DistributedDataParallel

from lightning_gradcomp.averaging import GradientAverager
from lightning_gradcomp.averaging.autotune import DENSE
from lightning_gradcomp.averaging.faults import TIMEOUT
from lightning_gradcomp.averaging.replicas import compare_replicas, replicated
from lightning_gradcomp.averaging.topology import resolve
from lightning_gradcomp.compressors import Compressor
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.plugin import buffers, sigterm
from lightning_gradcomp.plugin.base_strategy import BaseStrategy
from lightning_gradcomp.plugin.clipping import LocalClipping
from lightning_gradcomp.plugin.ddp_hook import DDPHook
from lightning_gradcomp.plugin.initial_weights import sent_if_they_differ
from lightning_gradcomp.plugin.local_weights import forward_at_local_weights
from lightning_gradcomp.plugin.rank_states import (
    export_optimizer_state,
    mean_optimizer_state,
    rank_state,
)
from lightning_gradcomp.plugin.validation import (
    check_callbacks,
    check_clipping,
    check_gradients,
    check_local_weights,
    check_model,
    check_optimizers,
    check_options,
    corrected,
)
from lightning_gradcomp.registry import build


class CompressedDDPStrategy(BaseStrategy):
    """Data-parallel training whose gradients travel compressed.

        Trainer(strategy=CompressedDDPStrategy(compressor=DGC(sparsity=0.999)), devices=2)

    Args:
        compressor: a compressor, or its name.
        topology: how payloads travel. "auto": a trial in the first steps chooses the fastest of dense steps,
            "all_gather" and "two_phase"; this depends on the clock, so name a topology if runs must be bit-identical.
            "all_gather": every rank receives all payloads. "two_phase": each rank averages a part and sends the mean
            on, compressed again; for many ranks. "server": the same with dense means. MXNet's kvstore names "device",
            "dist_sync" and "dist_sync_device" also work.
        inside: "compressed": every rank compresses its own gradient. "dense": the ranks of a node average their
            gradients first, and only nodes exchange payloads. Default: "compressed"; with topology="auto" it is
            "dense" if several nodes have several ranks each.
        residual_device: where residuals stay between steps: "device" (default, with the gradients) or "cpu".
        checkpoint_state: how a checkpoint saves the residuals. "gather": all of them, in the checkpoint. "sidecar": a
            file per rank in a folder next to the checkpoint. "auto": "gather" on one node up to 1 GiB, otherwise
            "sidecar". "mean": one copy of their mean; a resumed run is then not exact. "drop": none.
        timeout: how long a rank waits for the others before it raises an error. Increase it if one rank works alone,
            for example to prepare data.
        verify_replicas_every_n_steps: compares a checksum of every parameter, and of every buffer except running
            statistics, across the ranks at this interval; also detects every write into local weights.
        local_weights: computes gradients at the shared weights minus this rank's own unsent steps, if the compressor
            owns the momentum. False: at the shared weights, which costs accuracy; the module may then write into its
            weights in `training_step`.
        ddp_options: everything that `DDPStrategy` takes, except options that change how gradients are averaged.
            `gradient_as_bucket_view` defaults to True, which saves DDP a pass over its buckets.

    Raises:
        ValueError: an option, a Trainer feature or an optimizer that can't be honoured, before training starts.
    """

    def __init__(
        self,
        compressor: Compressor | str = "dgc",
        topology: str = "auto",
        inside: str | None = None,
        residual_device: str | None = None,
        checkpoint_state: str = "auto",
        timeout: timedelta = TIMEOUT,
        verify_replicas_every_n_steps: int | None = None,
        local_weights: bool = True,
        **ddp_options: Any,
    ) -> None:
        check_options(checkpoint_state, verify_replicas_every_n_steps, ddp_options)
        ddp_options.setdefault("gradient_as_bucket_view", True)
        super().__init__(timeout=timeout, **ddp_options)
        self.checkpoint_state = checkpoint_state
        self.verify_replicas_every_n_steps = verify_replicas_every_n_steps
        self.compressor: Compressor = build(compressor)
        resolve(topology, inside, residual_device, self.compressor)  # refuses
        self._averager_options: dict[str, Any] = {
            "topology": topology,
            "inside": inside,
            "residual_device": residual_device,
            "local_weights": local_weights,
        }
        self.averager: GradientAverager | None = None
        """Set while fitting."""
        self._clipping = LocalClipping()
        self._buffers_spared = self._steps_itself = False
        self._guards: list[Any] = []

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        """Refuse what can't be honoured, before other processes are started."""
        self._check_sidecars()
        if "torch._dynamo" in sys.modules and torch._dynamo.config.optimize_ddp == "python_reducer":
            allowed = "True or False: it calls DDP's hook with something else"
            raise refusal("torch._dynamo.config.optimize_ddp", "python_reducer", allowed)
        check_callbacks(self, trainer)
        check_model(self.compressor, module)
        if self.compressor.needs_optimizer:
            check_clipping(self.compressor, None, trainer, module)

    def configure_ddp(self) -> None:
        module = self.lightning_module
        assert module is not None
        with self.explained("sharing the initial weights"), sent_if_they_differ(module, self._ddp_kwargs):
            super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        as_ddp_does = {"broadcast_buffers", "forward_sync_buffers"}.isdisjoint(self._ddp_kwargs)
        self._buffers_spared = as_ddp_does and buffers.spare_buffers(self.model, self.compressor)
        self._hook = DDPHook(self.model, at_optimizer_step=not module.automatic_optimization)

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return  # with what an earlier fit has left, which a checkpoint may still be made of
        module = self.lightning_module
        assert module is not None
        check_optimizers(self.compressor, self.optimizers)
        check_clipping(self.compressor, self._corrected, trainer, module)
        with self.explained("setting up the averages"):
            self.averager = GradientAverager(
                module,
                self._clipping.take_over(self.compressor, self._corrected, trainer),
                optimizer=self._corrected,
                optimizers=self.optimizers,
                ranks_per_node=self.num_processes,
                **self._averager_options,
                epoch=trainer.current_epoch,
            )
        if self.averager.has_local_weights:
            check_local_weights(trainer, module)
        if self.verify_replicas_every_n_steps:
            self.averager.compare_all_local_weights()
        sigterm.set_handler(trainer)
        self.averager.steps = trainer.global_step  # another fit goes on counting
        self._compared = 0
        if not module.automatic_optimization:
            setattr(self.precision_plugin, "clip_gradients", self._clip_manually)  # noqa: B010 - shadows the method
            self._guards = [each.register_step_pre_hook(self._check_averaged) for each in self._hooked_optimizers]
        rank_zero_info(self.averager.describe())

    @property
    def _hooked_optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that have torch's hooks, which a wrapper of another optimizer may lack."""
        return [each for each in self.optimizers if hasattr(each, "_optimizer_step_pre_hooks")]

    @property
    def _corrected(self) -> torch.optim.Optimizer | None:
        assert self.lightning_module is not None
        return corrected(self.compressor, self.optimizers, self.lightning_module.automatic_optimization)

    def teardown(self) -> None:
        self._clipping.restore_trainer()
        vars(self.precision_plugin).pop("clip_gradients", None)
        for guard in self._guards:
            guard.remove()
        self._guards = []
        if self.averager is not None:
            self.averager.detach()
        if isinstance(self.model, DistributedDataParallel):
            self._hook.release()
        super().teardown()

    def on_train_start(self) -> None:
        assert self.averager is not None
        self.rank_states.put_back_accumulated(self.averager)
        super().on_train_start()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        assert self.lightning_module is not None and self.averager is not None
        self.averager.epoch = self.lightning_module.current_epoch
        self._decision = self.averager.begin_step()
        with self.explained("before a dense step"):
            sigterm.stop_before_dense_step(self._decision, self.lightning_module.trainer)

    def on_train_end(self) -> None:
        super().on_train_end()
        self._share_buffers()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As DDP's, at local weights: they stay until the end of backward, or of what ends this batch before it."""
        averager, module = self.averager, self.lightning_module
        assert averager is not None and module is not None
        training_step = super().training_step

        def forward() -> Any:
            with self._hook.forward(self._decision):
                return training_step(*args, **kwargs)

        if not module.automatic_optimization:  # there may be several backwards
            return forward()
        averager.use_optimizers(self._corrected, self.optimizers)
        return forward_at_local_weights(averager, module.trainer, forward)

    def on_exception(self, exception: BaseException) -> None:
        if self.averager is not None:
            self.averager.use_shared_weights(check=False)
        super().on_exception(exception)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights that all ranks share, also between forward and backward."""
        if self.averager is None:
            return super().lightning_module_state_dict()
        with self.averager.shared_weights():
            return super().lightning_module_state_dict()

    def _share_buffers(self) -> None:
        if self._buffers_spared:
            assert self.lightning_module is not None and self.averager is not None
            with self.explained("sharing buffers"):
                buffers.share_buffers(self.lightning_module, self.averager.ranks)

    on_validation_start = on_test_start = on_predict_start = _share_buffers

    def backward(
        self, closure_loss: torch.Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """As `Strategy.backward`. In automatic optimization the averages are there before `on_after_backward`."""
        module, precision, averager = self.lightning_module, self.precision_plugin, self.averager
        assert module is not None and averager is not None
        with averager.leaving_local_weights():
            self._hook.before_backward(averager, precision)
            self.pre_backward(closure_loss)
            closure_loss = precision.pre_backward(closure_loss, module)
            with self.explained("backward"):  # DDP averages in it where a step is dense
                precision.backward(closure_loss, module, optimizer, *args, **kwargs)
        self.post_backward(closure_loss)
        self._average(self._hook.after_backward)
        return precision.post_backward(closure_loss, module)

    def _average(self, average: Callable[..., bool], *args: Any) -> None:
        """Call the hook's `average(averager, *args)`; then end after a SIGTERM, and log what topology="auto" chose."""
        averager = self.averager
        assert averager is not None and self.lightning_module is not None
        tuned = averager.autotune.outcome if averager.autotune else ""
        with self.explained("averaging gradients"):
            by_averager = average(averager, *args)
        if by_averager:
            sigterm.stop_after_batch(averager, self.lightning_module.trainer)
        if averager.autotune and averager.autotune.outcome != tuned and averager.autotune.choice != DENSE:
            rank_zero_info(averager.autotune.outcome)

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """As DDP's; after the closure, gradients that are not averaged yet are. Error feedback is committed."""
        averager, module = self.averager, self.lightning_module
        assert averager is not None and module is not None
        gradients = 0
        averager.use_optimizers(self._corrected, self.optimizers)

        def closure_then_average() -> Any:
            nonlocal gradients
            result = closure()
            if not module.automatic_optimization:
                self._average(self._hook.before_optimizer_step, optimizer)
            gradients += 1
            check_gradients(averager.compressor, optimizer, gradients)
            return result

        self._steps_itself = True
        try:
            result = super().optimizer_step(optimizer, closure_then_average, model, **kwargs)
        finally:
            self._steps_itself = False
        if optimizer not in self._hooked_optimizers:
            averager.commit(optimizer)
        self._hook.after_optimizer_step()
        every = self.verify_replicas_every_n_steps
        if every and averager.steps != self._compared and averager.steps % every == 0:
            self._compared = averager.steps
            with self.explained("comparing replicas"):
                compare_replicas(replicated(module), averager.steps)
        return result

    def _clip_manually(
        self, optimizer: torch.optim.Optimizer, clip_val: float = 0.0, *args: Any, **kwargs: Any
    ) -> None:
        """`self.clip_gradients(optimizer, ...)` in manual optimization: clips the average, as under DDP.

        Raises:
            ValueError: a compressor that owns the momentum: what is cut off the average has left the memory.
        """
        name, precision = type(self.compressor).__name__, self.precision_plugin
        if clip_val > 0 and self.compressor.state_for(self._corrected).owns_momentum:
            allowed = f"{name}(clip_norm=...), which clips each rank's gradient before it is accumulated"
            raise refusal(f"clipping with {name} in manual optimization", "self.clip_gradients", allowed)
        own = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        self._average(self._hook.before_optimizer_step, own)
        type(precision).clip_gradients(precision, optimizer, clip_val, *args, **kwargs)

    def _check_averaged(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        """Before a step of an optimizer in manual optimization: `optimizer_step`, which averages, must have called it.

        Raises:
            ValueError: a step of torch's own optimizer, past Lightning's, with gradients that are not averaged.
        """
        if not self._steps_itself and self._hook.pending(optimizer):
            allowed = "those of self.optimizers(), whose step averages the gradients first"
            raise refusal("optimizer in manual optimization", f"torch's own {type(optimizer).__name__}", allowed)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """As DDP's, with the states of all ranks, and optimizers with the momentum that is kept in the averager, as
        plain DDP has it. A checkpoint of weights alone has none of it."""
        filepath, with_states = self._meet_to_save(checkpoint, filepath)
        states = []
        if with_states:
            assert self.averager is not None
            with self.explained("saving a checkpoint"):
                states = self.rank_states.put_into(checkpoint, filepath, self.averager, self._hook.accumulating)
        elif "optimizer_states" in checkpoint and self.averager is not None and not self._interrupted:
            states = [rank_state(self.averager, accumulating=False)]  # rank 0's momentum alone
        if states:
            assert self.averager is not None
            kept = mean_optimizer_state(states, self.averager)
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
                export_optimizer_state(kept, optimizer, state)
        super().save_checkpoint(checkpoint, filepath, storage_options)
        with self.explained("saving a checkpoint"):
            self.rank_states.after_saving(checkpoint, filepath)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        assert self.averager is not None
        self.averager.steps = self._steps
        self.rank_states.restore(checkpoint, self._loaded_from, self.averager)
