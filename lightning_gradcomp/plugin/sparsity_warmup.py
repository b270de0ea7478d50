"""SparsityWarmup: a callback that sets the sparsity by epoch, step or coverage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_gradcomp.compressors.base import LossyCompressor
from lightning_gradcomp.compressors.schedules import Ramp, Schedule, as_levels
from lightning_gradcomp.errors import check_whole, refusal
from lightning_gradcomp.plugin.gradient_strategy import GradientStrategy


class SparsityWarmup(Callback):
    """Sets the sparsity by training progress; replaces the compressor's own warm-up.

        SparsityWarmup([0.75, 0.9375, 0.984375, 0.996])          # as in the DGC paper, one level per epoch
        SparsityWarmup("exponential", periods=500, by="step", dense=100)
        SparsityWarmup([0.9375, 0.984375], by="coverage")        # 16 steps, then 64

    Progress is the Trainer's epoch or the number of averaged steps, so it survives a checkpoint. If a level would cost
    more than a dense step, the step is dense.

    Args:
        schedule: "exponential", "linear", a list of sparsities, or a callable (epoch, step) -> sparsity in [0, 1).
        periods: number of levels of "exponential" and "linear".
        by: the length of a level: an "epoch", a "step", or "coverage". "coverage" is 1 / density steps, which together
            send one entry per model element, so that the warm-up costs the same for any epoch length.
        dense: number of epochs of dense training before the first level; of steps, if `by` is not "epoch".

    Raises:
        ValueError: before training starts, if an option is out of range or the strategy's compressor has no sparsity.
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
            check_whole(f"SparsityWarmup.{name}", number, 0)
        if not callable(schedule):
            Ramp(as_levels(schedule, 0.999, periods), 0.999, dense, by)  # checks its options
        self.schedule, self.periods, self.by, self.dense = schedule, periods, by, dense

    def check_strategy(self, strategy: Any) -> None:
        """Raise ValueError unless the strategy sends gradients at every step and its compressor has a sparsity."""
        if not isinstance(strategy, GradientStrategy):
            allowed = "a strategy that sends gradients at every step: CompressedDDPStrategy or CompressedHSDPStrategy"
            raise refusal("the strategy of SparsityWarmup", type(strategy).__name__, allowed)
        compressor = strategy.compressor
        if not isinstance(compressor, LossyCompressor) or compressor.final_sparsity is None:
            got, allowed = type(compressor).__name__, "one whose compressor has a sparsity, such as 'dgc'"
            raise refusal("the strategy of SparsityWarmup", got, allowed)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.check_strategy(trainer.strategy)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        averager: Any = trainer.strategy.averager  # type: ignore[attr-defined] - see check_strategy
        final = averager.compressor.final_sparsity
        if callable(self.schedule):
            averager.schedule = self.schedule
        else:
            averager.schedule = Ramp(as_levels(self.schedule, final, self.periods), final, self.dense, self.by)
