"""DelayedStrategy: data-parallel training over a link with high latency. Ranks step alone; averages arrive later.

No gradients or buffers are exchanged. Before Lightning reads the weights, ranks drain: at the end of an epoch, before
validation, test and prediction, for a checkpoint, and at the end of a fit.

Private Lightning name used here: the fit loop's `_skip_backward`, set for passes that only update statistics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_gradcomp.averaging.faults import TIMEOUT
from lightning_gradcomp.compressors import Compressor
from lightning_gradcomp.compressors.base import build, check_no_clipping
from lightning_gradcomp.errors import check_share, refusal
from lightning_gradcomp.local_sgd.averager import DelayedAverager
from lightning_gradcomp.local_sgd.rounds import Nesterov
from lightning_gradcomp.local_sgd.schedule import Participants, RoundSchedule
from lightning_gradcomp.plugin import sigterm
from lightning_gradcomp.plugin.base_strategy import UnwrappedStrategy, averages_of
from lightning_gradcomp.plugin.validation import check_checkpoint_state

KEY = "lightning_gradcomp_delayed"
"""The averager's state in a checkpoint."""


class DelayedStrategy(UnwrappedStrategy):
    """Delayed gradient averaging, local SGD or DiLoCo: for links with high latency.

        Trainer(strategy=DelayedStrategy(period=8, delay=8), devices=2)

    Args:
        compressor: a compressor for the update of each round, or its name.
        period: K, the number of steps in a round. With `delay="auto"`, the smallest K. In manual optimization, one step
            is a batch in whose `training_step` at least one optimizer steps.
        delay: D, steps from the end of a round to the step that applies its average: 0 to `period`. With 0, ranks wait
            at the end of each round. `"auto"` measures the first rounds and chooses D; such runs do not repeat
            bit-identically.
        outer: an outer optimizer that steps on the mean update of each round, such as `Nesterov()`. `None`: the mean
            update is added to the weights.
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
        ValueError: before training starts, if an option is not supported, or for sync_batchnorm.
    """

    def __init__(
        self,
        compressor: Compressor | str = "none",
        period: int = 8,
        delay: int | str = 8,
        outer: Nesterov | None = None,
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
        self._check_ddp_options(options)
        self.compressor = build(compressor)
        check_no_clipping(self.compressor, "in rounds of local steps")
        RoundSchedule(period, delay)  # checks them
        check_share("pending_share", pending_share)
        Participants(participation)  # checks it
        check_share("error_decay", error_decay)
        check_checkpoint_state(checkpoint_state)
        if error_decay is None and checkpoint_state != "auto":
            allowed = "'auto': without error_decay ranks have no residuals after a drain"
            raise refusal("DelayedStrategy.checkpoint_state", checkpoint_state, allowed)
        if participation < 1 and checkpoint_state == "mean":
            allowed = "auto, gather, sidecar or drop: a rank that was never drawn has no moments"
            raise refusal("DelayedStrategy.checkpoint_state with participation below 1", checkpoint_state, allowed)
        self.checkpoint_state = checkpoint_state
        self.rule = {
            "period": period,
            "delay": delay,
            "outer": outer,
            "pending_share": pending_share,
            "participation": participation,
            "error_decay": error_decay,
        }
        """Options of `DelayedAverager`."""
        self._in_training_step = self._stepped = self._told_of_waits = False
        self._in_use = False
        """True while the step in progress needs the weights, so that they can't be averaged."""

    def setup(self, trainer: Trainer) -> None:
        self._in_use = False  # an earlier fit may have been interrupted
        super().setup(trainer)

    def make_averager(self, trainer: Trainer) -> DelayedAverager:
        averager = DelayedAverager(
            self.pl_module,
            self.optimizers,
            self.compressor,
            process_group=torch.distributed.new_group(timeout=self._timeout),  # type: ignore[arg-type] - of all
            epoch=trainer.current_epoch,
            **self.rule,
        )
        averager.averages = averages_of(trainer)
        return averager

    @contextmanager
    def explained(self, doing: str) -> Iterator[None]:
        """Like the template's. Warns once if a training step waits for other ranks, with the time."""
        begin = time.perf_counter()
        with super().explained(doing):
            yield
        if self._in_training_step and doing != "forward" and self.world_size > 1:
            seconds = time.perf_counter() - begin
            self.averager.spent.seconds["exchange"] += seconds
            if not self._told_of_waits:
                self._told_of_waits = True
                rank_zero_warn(
                    f"training_step waits for the other ranks ({doing}: {1e3 * seconds:.1f} ms this time), which "
                    "cancels the gain of delayed averaging. log(..., sync_dist=True) does that: use it in validation."
                )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self.pl_module.automatic_optimization else self._step_of_round():
            self._in_training_step, self._in_use = True, not self.pl_module.trainer.fit_loop._skip_backward
            try:
                return super().training_step(*args, **kwargs)
            finally:
                self._in_training_step = False

    def backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().backward(*args, **kwargs)
        self._in_use = not self.pl_module.automatic_optimization  # there, another forward pass may follow
        return loss

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Like `Strategy.optimizer_step`, but a resting rank only calls the closure, whose result Lightning needs."""
        with self._step_of_round() if self.pl_module.automatic_optimization else nullcontext():
            step = partial(super().optimizer_step, optimizer, closure, *args, **kwargs)
            result = closure() if self.averager.resting else step()
            self._stepped = True
        return result

    @contextmanager
    def _step_of_round(self) -> Iterator[None]:
        """One step of a round; at its end, sends an update, and applies an average that is due.

        In automatic optimization it is the optimizer's step, which calls `training_step`. In manual optimization it is
        `training_step`, if an optimizer steps in it. So no round ends between the steps of several optimizers, or while
        `toggle_optimizer` freezes parameters.
        """
        averager, trainer = self.averager, self.pl_module.trainer
        averager.epoch = trainer.current_epoch
        measuring = averager.round_schedule.measuring
        self._stepped = False
        averager.begin_step()
        yield
        if self._stepped:
            averager.end_step()
        self._in_use = False  # also if the module calls loss.backward() itself
        if measuring and not averager.round_schedule.measuring:
            rank_zero_info(averager.describe())
        if self._ends or averager.flagged:  # all ranks see the flags at the same step, and save drained weights
            self.agree()
        sigterm.stop_after_batch(averager, trainer)

    def agree(self) -> None:
        """Drain, so that all ranks hold the average, and copy rank 0's buffers to all ranks.

        Forward passes without steps change buffers too, as at the end of StochasticWeightAveraging.

        After an interruption, when other ranks may not answer, this rank returns to the latest average.
        """
        if self.averager is None:
            return
        if self._interrupted:
            if self.averager.reset_to_last_average():
                rank_zero_warn(
                    "Interrupted: this checkpoint holds the latest average; each rank's later steps are lost."
                )
            return
        if self._in_use:
            automatic = self.pl_module.automatic_optimization
            got = "one between forward and backward" if automatic else "one inside training_step"
            allowed = "one in on_train_batch_end: saving averages weights that this step still needs"
            raise refusal("checkpoint with DelayedStrategy", got, allowed)
        self.averager.drain()
        with self.explained("sharing buffers"):
            self.averager.share_buffers()

    def put_states(self, checkpoint: dict[str, Any], path: Any, with_states: bool) -> dict[str, Any]:
        """Add the state of the rounds, and with `error_decay` also each rank's."""
        if not with_states:
            return {}
        state = checkpoint[KEY] = self.averager.state_dict()
        if self.averager.error_decay is not None:
            self.rank_states.put_into(state, path, self.averager.rounds, accumulating=False)
            state["rounds"]["memory"] = {}
        return state

    def restore_states(self, checkpoint: Mapping[str, Any]) -> None:
        if (state := checkpoint.get(KEY)) is not None:
            self.averager.load_state_dict(state)
            if self.averager.error_decay is not None:
                self.rank_states.restore(state, self._loaded_from, self.averager.rounds)
