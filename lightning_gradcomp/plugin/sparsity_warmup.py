"""SparsityWarmup: a callback that sets the sparsity by epoch, step or coverage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_gradcomp.averaging import GradientAverager
from lightning_gradcomp.compressors.base import LossyCompressor
from lightning_gradcomp.compressors.schedules import Ramp, Schedule, as_levels
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.plugin.async_strategy import AsyncStrategy
from lightning_gradcomp.plugin.communication_monitor import averager_of
from lightning_gradcomp.plugin.delayed import DelayedStrategy


class SparsityWarmup(Callback):
    """Sets the sparsity by training progress, in place of the compressor's own warm-up.

        SparsityWarmup([0.75, 0.9375, 0.984375, 0.996])          # the DGC paper's, one level an epoch
        SparsityWarmup("exponential", periods=500, by="step", dense=100)
        SparsityWarmup([0.9375, 0.984375], by="coverage")        # for 16 steps and for 64

    The position is the Trainer's epoch (or the count of averaged steps), so it survives a checkpoint. A level that
    would cost more than a dense step travels dense.

    Args:
        schedule: "exponential", "linear", a list of sparsities, or a callable (epoch, step) -> sparsity in [0, 1).
        periods: number of levels of "exponential" and "linear".
        by: what a level lasts: "epoch"; "step"; or "coverage": 1 / density steps, in which as many entries are sent as
            the model has elements, so that the warm-up costs the same whatever the length of an epoch.
        dense: epochs of dense training before the first level; steps, where `by` is not "epoch".

    Raises:
        ValueError: an option out of its range, or a strategy whose compressor has no sparsity, before training starts.
    """

    def __init__(
        self,
        schedule: str | Sequence[float] | Schedule = "exponential",
        *,
        periods: int = 4,
        by: str = "epoch",
        dense: int = 0,
    ) -> None:
        for name, number in (("periods", periods), ("dense", dense)):
            if not isinstance(number, int) or number < 0:
                raise refusal(f"SparsityWarmup.{name}", number, "a whole number, 0 or more")
        if not callable(schedule):
            Ramp(as_levels(schedule, 0.999, periods), 0.999, dense, by)  # checks its options
        self.schedule, self.periods, self.by, self.dense = schedule, periods, by, dense

    def check_strategy(self, strategy: Any) -> None:
        """ValueError for a strategy whose compressor has no sparsity."""
        if isinstance(strategy, AsyncStrategy):
            allowed = "a strategy whose ranks step together: a push has one sparsity from start to end"
            raise refusal("the strategy of SparsityWarmup", "AsyncStrategy", allowed)
        compressor = getattr(strategy, "compressor", None)
        if not isinstance(compressor, LossyCompressor) or compressor.final_sparsity is None:
            got = type(strategy if compressor is None else compressor).__name__
            raise refusal("the strategy of SparsityWarmup", got, "one whose compressor has a sparsity, such as 'dgc'")
        if isinstance(strategy, DelayedStrategy):
            allowed = "a strategy that sends at every step; rounds have the compressor's own warm-up"
            raise refusal("the strategy of SparsityWarmup", "DelayedStrategy", allowed)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.check_strategy(trainer.strategy)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        averager = averager_of(trainer)
        assert isinstance(averager, GradientAverager)
        assert isinstance(averager.compressor, LossyCompressor)
        final = averager.compressor.final_sparsity
        assert final is not None  # as check_strategy has found
        if callable(self.schedule):
            averager.schedule = self.schedule
        else:
            averager.schedule = Ramp(as_levels(self.schedule, final, self.periods), final, self.dense, self.by)
