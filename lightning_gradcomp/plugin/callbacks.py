"""CommunicationMonitor shows what the exchange costs; SparsityWarmup sets how sparse it is, and when."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_gradcomp.averaging import DelayedAverager, GradientAverager, Stats
from lightning_gradcomp.averaging.meter import DelayedStats
from lightning_gradcomp.compressors.schedules import Ramp, Schedule, as_levels
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.plugin.delayed import DelayedStrategy
from lightning_gradcomp.plugin.strategy import CompressedDDPStrategy


def averager_of(trainer: Trainer) -> GradientAverager | DelayedAverager:
    """The averager of a fit that is under way."""
    strategy = trainer.strategy
    assert isinstance(strategy, CompressedDDPStrategy | DelayedStrategy) and strategy.averager is not None
    return strategy.averager


class CommunicationMonitor(Callback):
    """Bytes, ratio, sparsity and milliseconds of every step, in the progress bar and in every logger.

    Everything is rank-local: nothing is exchanged to show it. Logged each step, as this rank saw it:
    `comm/bytes_sent`, `comm/bytes_received` (traffic, which for all_gather grows with N), `comm/ratio_N<N>` (dense ring
    all-reduce traffic over it), `comm/sparsity`, and `time/<phase>_ms` for compute, compress, exchange and decompress.
    In a dense step, exchange is the part that backward did not hide. On a GPU the clock sees what the host waits for,
    which falls into decompress.

    With delayed averages bytes are booked where a round arrives, the ratio is that of all steps so far, exchange is how
    long the step waited for the network, and three more are logged: `dga/steps_under_way`, ends of steps that the
    latest average has seen on its way; `dga/late_rounds`, averages so far that a step had to wait for; and `dga/apart`,
    how far the ranks were apart, as a share of the weights' length.
    """

    def check_strategy(self, strategy: Any) -> None:
        """ValueError for a strategy that has nothing to show."""
        if not isinstance(strategy, CompressedDDPStrategy | DelayedStrategy):
            allowed = "a strategy of lightning_gradcomp ('ddp_dense' is plain DDP, measured)"
            raise refusal("the strategy of CommunicationMonitor", type(strategy).__name__, allowed)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.check_strategy(trainer.strategy)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        averager = averager_of(trainer)
        self._seen: Stats | DelayedStats = averager.stats
        self._booked, self._steps_seen = DelayedStats(), averager.steps
        self._steps: list[Stats] = []
        self._compute: list[float] = []
        self._elapsed = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._begin = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        averager = averager_of(trainer)
        self._elapsed += time.perf_counter() - self._begin
        stats, more = self._of_step(averager)
        if stats is None:  # gradients are still accumulating
            return
        self._steps.append(stats)
        self._compute.append(self._elapsed - sum(stats.seconds.values()))
        self._elapsed = 0.0
        world, ratio = averager.ranks.world, averager.stats.ratio
        phases = {"compute": self._compute[-1], **stats.seconds}
        pl_module.log_dict(
            {
                "comm/bytes_sent": float(stats.bytes_sent),
                "comm/bytes_received": float(stats.bytes_received),
                f"comm/ratio_N{world}": ratio,
                "comm/sparsity": stats.sparsity,
                **{f"time/{phase}_ms": 1e3 * seconds for phase, seconds in phases.items()},
                **more,
            }
        )
        bar = {"sent_MB": stats.bytes_sent / 1e6, f"ratio(N={world})": ratio}
        pl_module.log_dict(bar, prog_bar=True, logger=False)

    def _of_step(self, averager: GradientAverager | DelayedAverager) -> tuple[Stats | None, dict[str, float]]:
        """What the latest step cost, None if it was seen already; and what else there is to log."""
        if isinstance(averager, DelayedAverager):
            if averager.steps == self._steps_seen:
                return None, {}
            before, now = self._booked, replace(averager.stats)
            self._booked, self._steps_seen = now, averager.steps
            names = ("steps_under_way", "late_rounds", "apart")
            return now.since(before), {f"dga/{name}": float(getattr(now, name)) for name in names}
        if averager.stats is self._seen:
            return None, {}
        self._seen = averager.stats
        return averager.stats, {}

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        averager = averager_of(trainer)
        self._world, self._ratio = averager.ranks.world, averager.stats.ratio
        if isinstance(averager, DelayedAverager):
            self._how = {"rounds": {"period": averager.period, "delay": averager.delay, **asdict(averager.stats)}}
        else:
            topology = "all_reduce" if averager.dense_step else averager.topology
            trial = averager.trial.outcome if averager.trial else ""
            self._how = {"topology": topology, "auto": averager.modelled, "trial": trial}

    def summary(self) -> dict[str, Any]:
        """Totals over the fit and the last step's bytes, of this rank, and the median milliseconds a step by phase.

        With topology="auto", `auto` says in words what was chosen and why, and `trial` what the first steps have shown.
        With delayed averages, `rounds` has period, delay, and what they have cost until the end of the fit.
        """
        sent, dense = sum(s.bytes_sent for s in self._steps), sum(s.dense_bytes for s in self._steps)
        phases = {"compute": self._compute}
        phases |= {name: [s.seconds[name] for s in self._steps] for name in ("compress", "exchange", "decompress")}
        return {
            "world_size": self._world,
            **self._how,
            "steps": len(self._steps),
            "bytes_sent": sent,
            "dense_bytes": dense,
            "ratio": dense / sent if sent else 1.0,
            "last_step": {"bytes_sent": self._steps[-1].bytes_sent, "ratio": self._ratio},
            "milliseconds": {name: 1e3 * median(values) if values else 0.0 for name, values in phases.items()},
        }


class SparsityWarmup(Callback):
    """Sets the sparsity by training progress, in place of the compressor's own warm-up.

        SparsityWarmup([0.75, 0.9375, 0.984375, 0.996])          # the DGC paper's, one level an epoch
        SparsityWarmup("exponential", periods=500, by="step", dense=100)

    The position is the Trainer's epoch (or the count of averaged steps), so it survives a checkpoint. A level that
    would cost more than a dense step travels dense.

    Args:
        schedule: "exponential", "linear", a list of sparsities, or a callable (epoch, step) -> sparsity in [0, 1).
        periods: number of levels of "exponential" and "linear".
        by: "epoch" or "step": what a level lasts.
        dense: periods of dense training before the first level.
    """

    def __init__(
        self,
        schedule: str | Sequence[float] | Schedule = "exponential",
        *,
        periods: int = 4,
        by: str = "epoch",
        dense: int = 0,
    ) -> None:
        if periods < 0:
            raise refusal("SparsityWarmup.periods", periods, "0 or more")
        if not callable(schedule):
            Ramp(
                as_levels(schedule, 0.999, periods), 0.999, dense, by
            )  # its options are checked here, before any launch
        self.schedule, self.periods, self.by, self.dense = schedule, periods, by, dense

    def check_strategy(self, strategy: Any) -> None:
        """ValueError for a strategy whose compressor has no sparsity."""
        if not hasattr(getattr(strategy, "compressor", None), "sparsity"):
            compressor = getattr(strategy, "compressor", None)
            got = type(strategy if compressor is None else compressor).__name__
            raise refusal("the strategy of SparsityWarmup", got, "one whose compressor has a sparsity, such as 'dgc'")
        if isinstance(strategy, DelayedStrategy):
            allowed = "a strategy that sends at every step; here the compressor's own warm-up counts the epochs"
            raise refusal("the strategy of SparsityWarmup", "DelayedStrategy", allowed)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.check_strategy(trainer.strategy)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        averager = averager_of(trainer)
        assert isinstance(averager, GradientAverager)
        final = getattr(averager.compressor, "sparsity")  # noqa: B009 - check_strategy has found it
        if callable(self.schedule):
            averager.schedule = self.schedule
        else:
            averager.schedule = Ramp(as_levels(self.schedule, final, self.periods), final, self.dense, self.by)
