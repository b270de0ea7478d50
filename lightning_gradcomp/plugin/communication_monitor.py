"""CommunicationMonitor shows what the exchange costs."""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_gradcomp.averaging import DelayedAverager, GradientAverager, Stats
from lightning_gradcomp.averaging.meter import DelayedStats, Totals
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

    Two add up: `comm/total_bytes_sent`, bytes of gradients so far, and `time/total_s`, wall seconds since the fit
    began. They are logged beside the metrics of each of its validations too, and a fit that goes on from a checkpoint
    goes on from the values in it, which are rank 0's. Lightning logs in fp32; `summary` is exact.

    `memory/residual_to_gradient` is the length (L2 norm) of what this rank has not sent after a step, over that of its
    gradient in the step, before any clipping, both over the compressed parameters; with inside="dense", what its node
    has not sent. For DGC that is the velocity, in which momentum has added gradients up already. Owners' memories
    (topology="two_phase") are not in it. It takes two passes over the model, so only the steps that go to a logger
    have it; dense steps, the steps of topology="auto"'s trial and compressors that remember nothing have none.

    With delayed averages bytes are booked where a round arrives, the ratio is that of all steps so far, exchange is how
    long the step waited for the network, and three more are logged: `dga/steps_under_way`, ends of steps that the
    latest average has seen on its way; `dga/late_rounds`, averages so far that a step had to wait for; and `dga/apart`,
    how far the ranks were apart, as a share of the weights' length. What rounds leave out is not weighed: each drain
    averages it.

    Raises:
        ValueError: a strategy of others, before training starts.
    """

    def __init__(self) -> None:
        self._begun = self._ended = 0.0
        self._saved = Totals()
        self._spent: Totals | DelayedStats = Totals()

    def check_strategy(self, strategy: Any) -> None:
        """ValueError for a strategy that has nothing to show."""
        if not isinstance(strategy, CompressedDDPStrategy | DelayedStrategy):
            allowed = "a strategy of lightning_gradcomp ('ddp_dense' is plain DDP, measured)"
            raise refusal("the strategy of CommunicationMonitor", type(strategy).__name__, allowed)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.check_strategy(trainer.strategy)
        if stage == "fit":  # before a checkpoint's state is loaded
            self._begun, self._ended = time.perf_counter(), 0.0
            self._saved, self._spent = Totals(), Totals()
            # The totals are a rank's own, also beside a validation's metrics, which Lightning wants synchronised.
            ours = r"It is recommended to use `self\.log\('(comm/total_bytes_sent|time/total_s)'"
            warnings.filterwarnings("ignore", message=ours)

    @property
    def totals(self) -> Totals:
        """What the fit has cost so far, or has cost, with those that it goes on from."""
        seconds = (self._ended or time.perf_counter()) - self._begun if self._begun else 0.0
        saved, spent = self._saved, self._spent
        sent, dense = saved.bytes_sent + spent.bytes_sent, saved.dense_bytes + spent.dense_bytes
        return Totals(sent, dense, saved.seconds + seconds)

    def state_dict(self) -> dict[str, Any]:
        """The totals so far: plain numbers."""
        return asdict(self.totals)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from a state."""
        self._saved = Totals(**state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        averager = averager_of(trainer)
        self._spent = averager.stats if isinstance(averager, DelayedAverager) else Totals()
        self._seen: Stats | DelayedStats = averager.stats
        self._booked, self._steps_seen = DelayedStats(), averager.steps
        self._steps: list[Stats] = []
        self._compute: list[float] = []
        self._elapsed = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        averager = averager_of(trainer)
        if isinstance(averager, GradientAverager):
            averager.weighs = bool(trainer.loggers) and trainer._logger_connector.should_update_logs
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
        self._compute.append(self._elapsed - sum(stats.seconds.values()) - stats.weighing_seconds)
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
                **self._so_far(),
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
        assert isinstance(self._spent, Totals)
        self._spent.bytes_sent += averager.stats.bytes_sent
        self._spent.dense_bytes += averager.stats.dense_bytes
        residual = averager.stats.residual_to_gradient
        return averager.stats, {} if residual is None else {"memory/residual_to_gradient": residual}

    def _so_far(self) -> dict[str, float]:
        totals = self.totals
        return {"comm/total_bytes_sent": float(totals.bytes_sent), "time/total_s": totals.seconds}

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            pl_module.log_dict(self._so_far())

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        averager = averager_of(trainer)
        self._ended = time.perf_counter()
        self._world, self._ratio = averager.ranks.world, averager.stats.ratio
        if isinstance(averager, DelayedAverager):
            self._how = {"rounds": {"period": averager.period, "delay": averager.delay, **asdict(averager.stats)}}
        else:
            topology = "all_reduce" if averager.dense_step else averager.topology
            trial = averager.trial.outcome if averager.trial else ""
            self._how = {"topology": topology, "auto": averager.modelled, "trial": trial}

    def summary(self) -> dict[str, Any]:
        """Totals over the fit and the last step's bytes, of this rank, and the median milliseconds a step by phase.

        Call it after the fit. All bytes are this rank's, of gradients; `ratio` is dense bytes over bytes sent.
        `totals` has bytes, ratio and seconds with those of the fits that this one goes on from.
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
            "totals": {**asdict(self.totals), "ratio": self.totals.ratio},
            "last_step": {"bytes_sent": self._steps[-1].bytes_sent, "ratio": self._ratio},
            "milliseconds": {name: 1e3 * median(values) if values else 0.0 for name, values in phases.items()},
        }
