"""DelayedStrategy: data-parallel training over a link with a long delay. Ranks step alone; averages arrive later.

DDP does not wrap the model: no gradient travels, and no buffer. Wherever Lightning may look at the weights they are
drained first: at the end of an epoch, before validation, test and prediction, in a checkpoint, and at the end of a fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_gradcomp.averaging.faults import TIMEOUT
from lightning_gradcomp.compressors import Compressor
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.local_sgd.anchor import check_pending_share
from lightning_gradcomp.local_sgd.averager import DelayedAverager
from lightning_gradcomp.local_sgd.outer_optimizer import Nesterov
from lightning_gradcomp.local_sgd.participants import Participants
from lightning_gradcomp.local_sgd.rounds import check_error_decay
from lightning_gradcomp.local_sgd.schedule import RoundSchedule
from lightning_gradcomp.plugin import sigterm
from lightning_gradcomp.plugin.base_strategy import BaseStrategy
from lightning_gradcomp.plugin.validation import check_callbacks, check_checkpoint_state, check_model
from lightning_gradcomp.registry import build

KEY = "lightning_gradcomp_delayed"
"""Where a checkpoint has the averager's state."""


class DelayedStrategy(BaseStrategy):
    """Delayed gradient averaging, local SGD or DiLoCo: for links with a long delay.

        Trainer(strategy=DelayedStrategy(period=8, delay=8), devices=2)

    Args:
        compressor: a compressor for the update of each round, or its name.
        period: K, the number of steps in a round. With `delay="auto"`, the smallest K.
        delay: D, steps from the end of a round to the step that applies its average: 0 to `period`. With 0, ranks wait
            at the end of each round. `"auto"` measures the first rounds and chooses D; such runs do not repeat
            bit-identically.
        outer: an outer optimizer that steps on the mean update of each round, such as `Nesterov()`. `None`: the mean
            update is added to the weights.
        stale_only: apply averages only, not a rank's own steps. All ranks then have the same weights at every step, but
            every update is late. With momentum it did not train in our tests.
        pending_share: share of a rank's own update that stays in its weights until the average arrives, 0 to 1. `None`:
            half with Adam and AdamW, whose updates are mostly the rank's own noise, else 1.
        participation: share of the ranks whose steps count in a round, above 0 and up to 1, drawn for each round. The
            other ranks compute, but make no optimizer steps and receive the average.
        error_decay: `None`: a drain sends the residuals, uncompressed. A number from 0 to 1: ranks keep their residuals
            and multiply them by it once a round, as in SparseLoCo.
        checkpoint_state: with `error_decay`, where a checkpoint keeps each rank's moments and residual, as in
            `CompressedDDPStrategy`.
        timeout: how long a rank waits for the others before it raises an error.
        options: arguments with which `DDPStrategy` starts and connects processes, such as `process_group_backend`.

    Raises:
        ValueError: an option that can't be honoured, several optimizers, sync_batchnorm; before training starts.
    """

    def __init__(
        self,
        compressor: Compressor | str = "none",
        period: int = 8,
        delay: int | str = 8,
        outer: Nesterov | None = None,
        stale_only: bool = False,
        pending_share: float | None = None,
        participation: float = 1.0,
        error_decay: float | None = None,
        checkpoint_state: str = "auto",
        timeout: timedelta = TIMEOUT,
        **options: Any,
    ) -> None:
        if not isinstance(outer, Nesterov | None):
            raise refusal("DelayedStrategy.outer", outer, "None, or an outer optimizer: Nesterov(lr=0.7, momentum=0.9)")
        super().__init__(timeout=timeout, **options)
        for option in ("ddp_comm_hook", "model_averaging_period"):
            if options.get(option) is not None:
                raise refusal(f"DelayedStrategy.{option}", options[option], "None: DDP is not used")
        if self._ddp_kwargs:
            raise refusal("DelayedStrategy(...)", ", ".join(self._ddp_kwargs), "no options of DDP, which is not used")
        self.compressor: Compressor = build(compressor)
        RoundSchedule(period, delay)  # refuses
        check_pending_share(pending_share, stale_only=stale_only)
        Participants(participation)  # refuses
        check_error_decay(error_decay)
        check_checkpoint_state(checkpoint_state)
        if error_decay is None and checkpoint_state != "auto":
            allowed = "'auto': without error_decay a drain leaves nothing that a rank alone remembers"
            raise refusal("DelayedStrategy.checkpoint_state", checkpoint_state, allowed)
        if participation < 1 and checkpoint_state == "mean":
            allowed = "auto, gather, sidecar or drop: a rank that has not taken part yet has no moments"
            raise refusal("DelayedStrategy.checkpoint_state with participation below 1", checkpoint_state, allowed)
        self.checkpoint_state = checkpoint_state
        self.rule = {
            "period": period, "delay": delay, "outer": outer, "stale_only": stale_only,
            "pending_share": pending_share,
            "participation": participation, "error_decay": error_decay,
        }  # fmt: skip
        """Options of `DelayedAverager`."""
        self.averager: DelayedAverager | None = None
        """Set while fitting."""
        self._in_training_step = self._awaits_backward = self._told_of_waits = False

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        """Refuse what can't be honoured, before other processes are started."""
        check_callbacks(self, trainer)
        check_model(self.compressor, module)
        self._check_sidecars()
        if self._layer_sync is not None:
            raise refusal(
                "sync_batchnorm with DelayedStrategy", True, "False: it waits for the network in each forward"
            )

    def configure_ddp(self) -> None:
        """Nothing: no gradients are averaged."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        self._awaits_backward = False
        if trainer.state.fn != TrainerFn.FITTING:
            return
        assert self.lightning_module is not None
        if len(self.optimizers) > 1:
            raise refusal("optimizers with DelayedStrategy", len(self.optimizers), "1, whose steps are counted")
        with self.explained("setting up the averages"):
            self.averager = DelayedAverager(
                self.lightning_module,
                self.optimizers[0],
                self.compressor,
                process_group=torch.distributed.new_group(timeout=self._timeout),  # type: ignore[arg-type] - of all
                epoch=trainer.current_epoch,
                **self.rule,
            )
        self.averager.steps = trainer.global_step  # another fit goes on counting
        sigterm.set_handler(trainer)
        rank_zero_info(self.averager.describe())

    @contextmanager
    def explained(self, doing: str) -> Iterator[None]:
        """Name what fails inside; and say once what it costs where a step waits for it."""
        begin = time.perf_counter()
        with super().explained(doing):
            yield
        if self._in_training_step and doing != "forward" and self.world_size > 1:
            seconds = time.perf_counter() - begin
            assert self.averager is not None
            self.averager.stats.stall_seconds += seconds
            if not self._told_of_waits:
                self._told_of_waits = True
                rank_zero_warn(
                    f"training_step waits for the other ranks ({doing}: {1e3 * seconds:.1f} ms this time), which "
                    "undoes what delayed averaging gains. log(..., sync_dist=True) does that: leave it to validation."
                )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        self._in_training_step = self._awaits_backward = True
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self._in_training_step = False
            self._awaits_backward = self.lightning_module.automatic_optimization

    def backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().backward(*args, **kwargs)
        self._awaits_backward = False
        return loss

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `Strategy.optimizer_step`; then sends, and applies what is due."""
        assert self.averager is not None and self.lightning_module is not None
        trainer = self.lightning_module.trainer
        self.averager.epoch = trainer.current_epoch
        measuring = self.averager.round_schedule.measuring
        with self.averager.stepping():
            step = partial(super().optimizer_step, optimizer, closure, model, **kwargs)
            result = closure() if self.averager.resting else step()  # Lightning counts on the closure's result
        self._awaits_backward = False  # also where the module calls loss.backward() itself
        if measuring and not self.averager.round_schedule.measuring:
            rank_zero_info(self.averager.describe())
        ends = trainer.is_last_batch or trainer.global_step + 1 == trainer.max_steps
        if ends or self.averager.flagged:
            self.drain()
        if self.averager.flagged:  # SIGTERM: all ranks know at this step, and what is saved on the way out is drained
            sigterm.stop_after_batch(self.averager, trainer)
        return result

    def drain(self) -> None:
        """Let all ranks hold the same weights. Collective; nothing to do where no step was made since the last time.

        Raises:
            ValueError: a forward pass whose backward is still to come.
        """
        if self._awaits_backward:
            allowed = "after backward, as in on_train_batch_end: saving averages the weights that backward needs"
            raise refusal("checkpoint with DelayedStrategy", "one between forward and backward", allowed)
        if self.averager is not None:
            self.averager.drain()

    on_validation_start = on_test_start = on_predict_start = drain

    def on_train_end(self) -> None:
        super().on_train_end()
        self.drain()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The drained weights. Collective, as the Trainer's `save_checkpoint` is.

        After an interruption, without the others: what all ranks agreed on last.
        """
        if self.averager is not None and self._interrupted:
            if self.averager.reset_to_last_average():
                rank_zero_warn(
                    "Interrupted: this checkpoint holds the latest average; each rank's steps since are lost."
                )
        else:
            self.drain()
        return super().lightning_module_state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """As DDP's, with the state of the rounds; a checkpoint of weights alone has none of it."""
        filepath, with_states = self._meet_to_save(checkpoint, filepath)
        if with_states:
            assert self.averager is not None
            with self.explained("saving a checkpoint"):
                checkpoint[KEY] = self.averager.state_dict()
                if self.averager.error_decay is not None:
                    self.rank_states.put_into(checkpoint[KEY], filepath, self.averager.rounds, accumulating=False)
                    checkpoint[KEY]["rounds"]["memory"] = {}
        super().save_checkpoint(checkpoint, filepath, storage_options)
        with self.explained("saving a checkpoint"):
            self.rank_states.after_saving(checkpoint.get(KEY, {}), filepath)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Also of a checkpoint that another strategy has written, or a world of another size."""
        super().load_optimizer_state_dict(checkpoint)
        assert self.averager is not None
        if KEY in checkpoint:
            self.averager.load_state_dict(checkpoint[KEY])
            if self.averager.error_decay is not None:
                self.rank_states.restore(checkpoint[KEY], self._loaded_from, self.averager.rounds)
        self.averager.steps = self._steps
