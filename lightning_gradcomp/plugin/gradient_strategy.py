"""The template of strategies that average each step's gradients: CompressedDDPStrategy and CompressedHSDPStrategy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_gradcomp.averaging import Decision, GradientAverager
from lightning_gradcomp.averaging.fsdp.shards import local
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.replicas import compare_replicas, replicated, share_buffers
from lightning_gradcomp.compressors import LossyCompressor
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.plugin import sigterm
from lightning_gradcomp.plugin.base_strategy import BaseStrategy, averages_of
from lightning_gradcomp.plugin.direction_warnings import DirectionWarnings
from lightning_gradcomp.plugin.manual_steps import ManualSteps, Turn
from lightning_gradcomp.plugin.validation import (
    check_clipping,
    check_clipping_averages,
    check_gradients,
    check_local_weights,
    check_optimizers,
    clips,
    corrected_optimizer,
)


class GradientStrategy(BaseStrategy):
    """A strategy with a `GradientAverager`. It takes a decision once per batch, uses local weights in forward and
    backward, and averages before Lightning's `on_after_backward`. If several optimizers train in manual optimization,
    it averages an optimizer's gradients when that optimizer steps, before Lightning's `on_before_optimizer_step`.

    Private Lightning name used here: the fit loop's `_skip_backward`, set for passes that only update statistics.
    """

    verify_replicas_every_n_steps: int | None
    _decision: Decision
    """What this batch's step does."""
    _shares_buffers = True
    """True if buffers are rank 0's whenever Lightning reads them."""
    _compared = 0
    """Number of steps at the last comparison of replicas."""
    _grad_scale = 1.0
    """The loss scale in the gradients."""

    @abstractmethod
    def averager_options(self) -> dict[str, Any]:
        """The averager's options that are specific to this strategy."""

    @abstractmethod
    def after_backward(self) -> Turn | None:
        """What to average after this backward. None if gradients accumulate, or an optimizer's step averages them."""

    # Around a fit

    def make_averager(self, trainer: Trainer) -> GradientAverager:
        check_optimizers(self.compressor, self.optimizers)
        check_clipping(self.compressor, self._corrected, trainer, self.pl_module)
        if clips(trainer) and isinstance(self.compressor, LossyCompressor):
            what = "each rank's gradient before it is accumulated"
            if not self._owns_momentum:
                what = "the average after it was sent: what it cuts is lost"
            rank_zero_info(f"gradient_clip_val={trainer.gradient_clip_val} clips {what}.")
        return GradientAverager(
            self.pl_module,
            self.compressor,
            optimizer=self._corrected,
            optimizers=self.optimizers,
            epoch=trainer.current_epoch,
            **self.averager_options(),
        )

    @property
    def _corrected(self) -> torch.optim.Optimizer | None:
        return corrected_optimizer(self.compressor, self.optimizers, self.pl_module.automatic_optimization)

    @property
    def _owns_momentum(self) -> bool:
        return self.compressor.state_for(self._corrected).owns_momentum

    def setup(self, trainer: Trainer) -> None:
        self._manual_steps = ManualSteps()
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._compared = 0
            if self.averager.has_local_weights:
                check_local_weights(trainer, self.pl_module)
            if self.verify_replicas_every_n_steps:
                self.averager.compare_all_local_weights()
            self._direction_warnings = DirectionWarnings(self.averager, trainer, self.pl_module)
            setattr(self.precision_plugin, "clip_gradients", self._clip_gradients)  # noqa: B010 - shadows the method
            manual = not self.pl_module.automatic_optimization
            self.watch_steps(before=self._check_averaged if manual else None, after=self._after_step)

    def agree(self) -> None:
        """Compare frozen parameters that have changed, and copy rank 0's buffers to all ranks.

        During a fit, forward passes at local weights, or of each rank's data, change buffers.
        """
        if self.averager is None:
            return
        with self.explained("comparing frozen parameters and sharing buffers"):
            if self.pl_module.trainer.state.fn == TrainerFn.FITTING:
                self.averager.compare_untrained()
            if self._shares_buffers:
                averages = [average.module for average in averages_of(self.pl_module.trainer)]
                share_buffers([self.pl_module, *averages], Ranks(dist.group.WORLD))

    def teardown(self) -> None:
        vars(self.precision_plugin).pop("clip_gradients", None)
        if self.averager is not None:
            self.averager.detach()
        super().teardown()

    # Steps

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.averager.epoch = self.pl_module.current_epoch
        self._decision = self.averager.begin_step()
        with self.explained("before a dense step"):
            sigterm.stop_before_dense_step(self._decision, self.pl_module.trainer)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Like Lightning's. Automatic optimization uses local weights until the end of backward.

        After an exception, or for an output without a loss, this restores the shared weights.
        """
        averager, forward = self.averager, super().training_step
        if not self.pl_module.automatic_optimization:  # there may be several backwards
            return forward(*args, **kwargs)
        averager.use_optimizers(self._corrected, self.optimizers)
        if not self.pl_module.trainer.fit_loop._skip_backward:
            averager.use_local_weights()
        try:
            output = forward(*args, **kwargs)
        except BaseException:
            averager.use_shared_weights(check=False)
            raise
        if output is None or (isinstance(output, Mapping) and output.get("loss") is None):
            averager.use_shared_weights()  # there will be no backward
        return output

    def on_exception(self, exception: BaseException) -> None:
        if self.averager is not None:
            self.averager.use_shared_weights(check=False)
        super().on_exception(exception)

    def backward(
        self, closure_loss: torch.Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Like Lightning's. `p.grad` is averaged before `on_after_backward`, except in manual optimization if several
        optimizers have parameters that require gradients."""
        precision = self.precision_plugin
        if not self.pl_module.automatic_optimization:
            self.averager.use_optimizers(self._corrected, self.optimizers)
            if self._manual_steps.take_back(self.averager):
                self._direction_warnings.revoked()
        scaler = getattr(precision, "scaler", None)
        self._grad_scale = scaler.get_scale() if scaler else 1.0
        with self.averager.leaving_local_weights():
            self.pre_backward(closure_loss)
            closure_loss = precision.pre_backward(closure_loss, self.pl_module)
            with self.explained("backward"):  # DDP and FSDP exchange gradients in it
                precision.backward(closure_loss, self.pl_module, optimizer, *args, **kwargs)
        self.post_backward(closure_loss)
        if self.pl_module.automatic_optimization and self._owns_momentum:
            self._clip_locally(self.pl_module.trainer)
        if turn := self.after_backward():
            self._average(turn)
        return precision.post_backward(closure_loss, self.pl_module)

    def _average(self, turn: Turn) -> None:
        """Average, or record what DDP has averaged. Then end after a SIGTERM, and log what topology="auto" chose."""
        averager, autotune = self.averager, self.averager.autotune
        before = autotune.outcome if autotune else ""
        self._direction_warnings.before_average()
        with self.explained("averaging gradients"):
            turn.average(averager, self._grad_scale)
        if turn.ddp_seconds is None:
            self._direction_warnings.after_average(in_step=self._in_step)
            sigterm.stop_after_batch(averager, self.pl_module.trainer)
        if autotune and autotune.outcome != before and autotune.choice != autotune.uncompressed:
            rank_zero_info(autotune.outcome)

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Like Lightning's. Also commits error feedback, and compares replicas at the chosen interval. In manual
        optimization, averages gradients that are not averaged yet after the closure."""
        averager, gradients = self.averager, 0
        averager.use_optimizers(self._corrected, self.optimizers)

        def counted_closure() -> Any:
            nonlocal gradients
            result = closure()
            gradients += 1
            check_gradients(averager.compressor, optimizer, gradients)
            if not self.pl_module.automatic_optimization:
                self._average_for(optimizer)
            return result

        result = super().optimizer_step(optimizer, counted_closure, *args, **kwargs)
        self._direction_warnings.after_step(optimizer)  # also if a loss scaler skipped it
        if not hasattr(optimizer, "_optimizer_step_post_hooks"):  # a wrapper of another optimizer may lack torch's
            averager.commit(optimizer)
        every = self.verify_replicas_every_n_steps
        if every and averager.steps != self._compared and averager.steps % every == 0:
            self._compared = averager.steps
            with self.explained("comparing replicas"):
                named = [(name, local(tensor)) for name, tensor in replicated(self.pl_module)]
                compare_replicas(named, averager.steps, averager.ranks.group)
        return result

    def _average_for(self, optimizer: torch.optim.Optimizer) -> None:
        if turn := self._manual_steps.before_step(self.averager, optimizer):
            self._average(turn)

    def _clip_locally(self, trainer: Trainer) -> None:
        """Have compressed steps clip each rank's gradient at the Trainer's current threshold.

        Lightning clips gradients after the average. The values of a sparse average have left the residual by then, so
        clipping would lose part of them. DGC clips each rank's gradient before it is accumulated (Lin et al. 2018,
        §3.2). Raises ValueError if a callback set something that can't be applied there.
        """
        assert isinstance(self.compressor, LossyCompressor)
        check_clipping(self.compressor, self._corrected, trainer, self.pl_module)
        threshold = trainer.gradient_clip_val
        self.averager.clip_norm = float(threshold) if threshold and clips(trainer) else self.compressor.clip_norm

    def _clip_gradients(
        self, optimizer: torch.optim.Optimizer, clip_val: float = 0.0, *args: Any, **kwargs: Any
    ) -> None:
        """Clip averages as with DDP, for the Trainer or for `self.clip_gradients(optimizer, ...)`.

        Does nothing to update directions, whose gradients were clipped before they were accumulated.
        """
        automatic = self.pl_module.automatic_optimization
        if clip_val > 0 and not (automatic and clip_val == self.pl_module.trainer.gradient_clip_val):
            where = "in manual optimization" if not automatic else "by another threshold than the Trainer's"
            check_clipping_averages(self.compressor, self._corrected, where, "self.clip_gradients")
        if not automatic:
            self._average_for(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)
        elif self.averager.has_directions:
            return
        precision = self.precision_plugin
        type(precision).clip_gradients(precision, optimizer, clip_val, *args, **kwargs)

    def _after_step(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        self._direction_warnings.after_step(optimizer)

    def _check_averaged(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        if not self._in_step and self._manual_steps.is_pending(optimizer):
            allowed = "one from self.optimizers(), whose step averages the gradients first"
            raise refusal("optimizer in manual optimization", f"torch's own {type(optimizer).__name__}", allowed)

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights that all ranks share, even between forward and backward."""
        with nullcontext() if self.averager is None else self.averager.shared_weights():
            return super().lightning_module_state_dict()
