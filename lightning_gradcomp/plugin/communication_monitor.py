"""CommunicationMonitor: a callback that logs bytes, ratio, sparsity and time of the exchange."""

from __future__ import annotations

import time
import warnings
from collections import deque
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lightning_gradcomp.averaging import GradientAverager, Stats
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.local_sgd.averager import DelayedAverager
from lightning_gradcomp.local_sgd.stats import DelayedStats
from lightning_gradcomp.parameter_server.averager import AsyncAverager
from lightning_gradcomp.plugin.async_strategy import AsyncStrategy
from lightning_gradcomp.plugin.delayed import DelayedStrategy
from lightning_gradcomp.plugin.hsdp import CompressedHSDPStrategy
from lightning_gradcomp.plugin.sigterm import Averager
from lightning_gradcomp.plugin.strategy import CompressedDDPStrategy
from lightning_gradcomp.plugin.uncompressed_run import why_uncompressed

RECENT_STEPS = 1000
"""Steps over which `summary` takes medians: the most recent ones. Older steps' times are not kept."""
PHASES = ("compute", "compress", "exchange", "decompress")

STRATEGIES = (CompressedDDPStrategy, CompressedHSDPStrategy, DelayedStrategy, AsyncStrategy)


def averager_of(trainer: Trainer) -> Averager:
    """The averager of a fit."""
    strategy = trainer.strategy
    assert isinstance(strategy, STRATEGIES) and strategy.averager is not None
    return strategy.averager


@dataclass
class Totals:
    """What one rank's fit has cost so far, with the fits that it goes on from.

    Args:
        bytes_sent: as in `Stats`, of all steps.
        dense_bytes: likewise.
        seconds: wall time.
    """

    bytes_sent: int = 0
    dense_bytes: int = 0
    seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """Dense traffic over the traffic of all steps; 1 where nothing is exchanged."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0


class CommunicationMonitor(Callback):
    """Bytes, ratio, sparsity and milliseconds of every step, in the progress bar and in every logger.

    Everything is rank-local: nothing is exchanged to show it. Logged at the steps that go to a logger
    (`Trainer(log_every_n_steps=...)`), as this rank saw them:
    `comm/bytes_sent`, `comm/bytes_received` (traffic, which for all_gather grows with N), `comm/ratio_N<N>` (dense ring
    all-reduce traffic over it), `comm/sparsity`, and `time/<phase>_ms` for compute, compress, exchange and decompress.
    In a dense step, exchange is the part that backward did not hide. On a GPU the clock sees what the host waits for,
    which falls into decompress.

    Two add up: `comm/total_bytes_sent`, bytes of gradients so far, and `time/total_s`, wall seconds since the fit
    began. They are logged beside the metrics of each of its validations too, and a fit that goes on from a checkpoint
    goes on from the values in it, which are rank 0's. Lightning logs in fp32; `summary` is exact.

    `memory/residual_to_gradient` is the length (L2 norm) of what this rank has not sent after a step, over that of its
    gradient in the step, before any clipping, both over the compressed parameters; with inside="dense", what its node
    has not sent. For DGC that is the velocity, in which momentum has added gradients up already. The residuals of
    shards (topology="two_phase") are not in it. It takes two passes over the model, so only the steps that go to a
    logger have it; dense steps, the steps that topology="auto" times and compressors without a residual have none.

    With delayed averaging the bytes of a round are logged at the step that applies its average, the ratio is that of
    all steps so far, and exchange is the time that the step waited for the network. Three more metrics are logged:
    `dga/overlapped_steps`, steps that ended while the latest exchange was running; `dga/late_rounds`, averages so far
    that a step or a drain had to wait for; and `dga/consensus_distance`, the distance between the ranks' weights and
    their average, over the norm of the weights. The residual of rounds is not measured: each drain averages it.

    With dist_async three more metrics are logged: `async/clock`, the rank's steps; `async/staleness`, the pushes of
    other ranks since its last pull; and `async/dropped`, servers that have dropped its push. Bytes are those of
    pushes and pulls. The residual is not measured.

    Where a compressor has compressed no step of a fit, a warning at its end says why.

    Memory is bounded: totals are running sums, and times are kept of the most recent 1,000 steps.

    Raises:
        ValueError: another strategy, before training starts.
    """

    def __init__(self) -> None:
        self._begun = self._ended = 0.0
        self._summary: dict[str, Any] = {}
        self._saved = Totals()
        self._blank()

    def _blank(self) -> None:
        """Nothing was seen yet of a fit."""
        self._spent: Stats | DelayedStats = Stats()
        self._counted: Any = Stats()
        """What was spent when a batch ended last, of the same type."""
        self._steps = self._last_bytes_sent = self._steps_seen = 0
        self._times = {phase: deque[float](maxlen=RECENT_STEPS) for phase in PHASES}
        self._elapsed = 0.0

    def check_strategy(self, strategy: Any) -> None:
        """ValueError for a strategy that has nothing to show."""
        if not isinstance(strategy, STRATEGIES):
            allowed = "a strategy of lightning_gradcomp ('ddp_dense' is plain DDP, measured)"
            raise refusal("the strategy of CommunicationMonitor", type(strategy).__name__, allowed)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.check_strategy(trainer.strategy)
        if stage == "fit":  # before a checkpoint's state is loaded
            self._begun, self._ended, self._summary = time.perf_counter(), 0.0, {}
            self._saved = Totals()
            self._blank()
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
        self._spent = averager.stats if isinstance(averager, DelayedAverager) else averager.spent
        self._counted, self._steps_seen = type(self._spent)(), averager.steps

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        averager = averager_of(trainer)
        if isinstance(averager, GradientAverager):
            averager.measures_residual = bool(trainer.loggers) and trainer._logger_connector.should_update_logs
        self._begin = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        averager = averager_of(trainer)
        self._elapsed += time.perf_counter() - self._begin
        if averager.steps == self._steps_seen:  # gradients are still accumulating
            return
        stats, more = self._of_steps(averager)
        compute = self._elapsed - sum(stats.seconds.values()) - stats.norm_seconds
        phases = {"compute": compute, **stats.seconds}
        self._steps += averager.steps - self._steps_seen
        self._steps_seen = averager.steps
        self._last_bytes_sent = stats.bytes_sent
        for phase, times in self._times.items():
            times.append(phases[phase])
        self._elapsed = 0.0
        world, ratio = averager.world, (averager.stats if isinstance(averager, DelayedAverager) else stats).ratio
        if trainer._logger_connector.should_update_logs:  # at other steps it would take milliseconds, and go nowhere
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

    def _of_steps(self, averager: Averager) -> tuple[Stats, dict[str, float]]:
        """What a batch's steps have cost (several, in manual optimization); and what else there is to log."""
        if isinstance(averager, DelayedAverager):
            now = replace(averager.stats)
            names = ("overlapped_steps", "late_rounds", "consensus_distance")
            more = {f"dga/{name}": float(getattr(now, name)) for name in names}
        elif isinstance(averager, AsyncAverager):
            now = replace(averager.spent)
            names = ("clock", "staleness", "dropped")
            more = {f"async/{name}": float(getattr(averager.stats, name)) for name in names}
        else:
            now, more = replace(averager.spent), averager.metrics()
        stats, self._counted = now.since(self._counted), now
        return stats, more

    def _so_far(self) -> dict[str, float]:
        totals = self.totals
        return {"comm/total_bytes_sent": float(totals.bytes_sent), "time/total_s": totals.seconds}

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            pl_module.log_dict(self._so_far())

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        averager = averager_of(trainer)
        self._ended = time.perf_counter()
        if isinstance(averager, DelayedAverager):
            how: dict[str, Any] = {
                "rounds": {"period": averager.period, "delay": averager.delay, **asdict(averager.stats)}
            }
        elif isinstance(averager, AsyncAverager):
            seen = {str(staleness): steps for staleness, steps in sorted(averager.staleness.items())}
            how = {"topology": "dist_async", "auto": "", "async": {"staleness": seen}}
        else:
            how = averager.summary()
        self._summary = {
            "world_size": averager.world,
            **how,
            "steps": self._steps,
            "bytes_sent": self._counted.bytes_sent,
            "dense_bytes": self._counted.dense_bytes,
            "ratio": self._counted.ratio,
            "totals": {**asdict(self.totals), "ratio": self.totals.ratio},
            "last_step": {"bytes_sent": self._last_bytes_sent, "ratio": averager.stats.ratio},
            "milliseconds": {phase: 1e3 * median(times) if times else 0.0 for phase, times in self._times.items()},
        }
        if self._steps and (why := why_uncompressed(averager)):
            rank_zero_warn(f"{type(averager.compressor).__name__} compressed no step of this run: {why}.")

    def summary(self) -> dict[str, Any]:
        """Totals over the fit, the last step's bytes, and medians of the milliseconds a step, of this rank.

        Call it after the fit. With start_method "spawn", "fork" or "forkserver", the main process has rank 0's. All
        bytes are of gradients; `ratio` is dense bytes over bytes sent. `milliseconds` has a median a phase, over the
        most recent 1,000 steps. `totals` has bytes, ratio and seconds with those of the fits that this one continues.
        With topology="auto", `auto` says what was chosen and why. Of a sharded model, `shards` is the number of ranks
        that have a replica together, and `world_size` that of the replicas. With delayed averages, `rounds` has period,
        delay, and what they have cost until the end of the fit. With dist_async, `async` has how often each staleness
        was seen.

        Raises:
            RuntimeError: no fit has ended.
        """
        if not self._summary:
            raise RuntimeError("CommunicationMonitor.summary(): no fit with this monitor has ended in this process")
        return self._summary

    def rank_zero_results(self) -> dict[str, Any]:
        """What the main process gets from rank 0 where ranks are started by multiprocessing."""
        return {"summary": self._summary, "totals": self.state_dict()}

    def load_rank_zero_results(self, results: dict[str, Any]) -> None:
        """In the main process: have what `rank_zero_results` returned on rank 0."""
        self._summary = results["summary"]
        self.load_state_dict(results["totals"])
