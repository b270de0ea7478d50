"""CommunicationMonitor: a callback that logs the exchange's bytes, ratio, sparsity and time."""

from __future__ import annotations

import time
import warnings
from collections import deque
from dataclasses import replace
from statistics import median
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lightning_gradcomp.averaging import Stats
from lightning_gradcomp.errors import help_at, refusal
from lightning_gradcomp.plugin.base_strategy import Averager, BaseStrategy

RECENT_STEPS = 1000
"""Number of latest steps whose times are kept, and over which `summary` takes medians."""
PHASES = ("compute", "compress", "exchange", "decompress")


def averager_of(trainer: Trainer) -> Averager:
    """The averager of a fit."""
    assert isinstance(trainer.strategy, BaseStrategy)
    return trainer.strategy.averager


class CommunicationMonitor(Callback):
    """Logs bytes, ratio, sparsity and milliseconds of every step to the progress bar and to every logger.

    All values are this rank's; nothing is exchanged to obtain them. The steps that go to a logger
    (`Trainer(log_every_n_steps=...)`) have `comm/bytes_sent` and `comm/bytes_received` (traffic, which grows with N for
    all_gather), `comm/ratio_N<N>` (dense ring all-reduce traffic over that), `comm/sparsity` (0 in a dense step;
    missing in a compressed step of a method without one), and `time/<phase>_ms` for compute, compress, exchange and
    decompress. In a dense step, exchange is the part that backward did not hide. On a GPU the clock measures how long
    the host waits, which falls into decompress.

    Two metrics are sums: `comm/total_bytes_sent`, gradient bytes so far, and `time/total_s`, wall-clock seconds since
    the fit began. They are also logged with each validation's metrics. A fit that resumes from a checkpoint continues
    from its sums, which are rank 0's. Lightning logs in fp32; `summary` is exact.

    `memory/residual_to_gradient` is the L2 norm of this rank's residual after a step, divided by that of its gradient
    before any clipping, both over the compressed parameters. With inside="dense" the residual is the node's. For DGC
    the residual is the velocity, in which momentum counts a gradient several times. The residuals of partitions
    (topology="two_phase") are excluded. The metric takes two passes over the model, so only the steps that go to a
    logger have it. Dense steps, steps that topology="auto" times, and compressors without a residual do not have it.

    With delayed averaging, a round's bytes are logged at the step that applies its average, the ratio covers all steps
    so far, and exchange is the time that the step waited for the network. There are three more metrics:
    `dga/overlapped_steps`, steps that ended while the latest exchange was running; `dga/late_rounds`, averages so far
    that a step or a drain had to wait for; and `dga/consensus_distance`, the distance between the ranks' weights and
    their average, divided by the norm of the weights. Residuals are not measured, because each drain averages them.

    With dist_async there are two more metrics: `async/clock`, the rank's steps, and `async/staleness`, the pushes of
    other ranks since its last pull. Bytes are those of pushes and pulls. The residual is not measured.

    If no step of a fit was compressed, a warning at the end says why.

    Memory is bounded: totals are running sums, and only the times of the latest 1,000 steps are kept.

    Raises:
        ValueError: before training starts, for a strategy of another package.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        """Reset to the state before a fit."""
        self._began = self._ended = 0.0
        self._summary: dict[str, Any] = {}
        self._saved: dict[str, Any] = {"bytes_sent": 0, "dense_bytes": 0, "seconds": 0.0}
        """Totals of the fits that this one continues."""
        self._spent = self._counted = Stats()
        """Costs of the fit: the averager's running sum, and its value at the end of the last batch."""
        self._last = {"bytes_sent": 0, "ratio": 1.0}
        self._steps = self._steps_seen = 0
        self._times = {phase: deque[float](maxlen=RECENT_STEPS) for phase in PHASES}
        self._elapsed = 0.0

    def check_strategy(self, strategy: Any) -> None:
        """Raise ValueError for a strategy without an averager."""
        if not isinstance(strategy, BaseStrategy):
            allowed = "a strategy of lightning_gradcomp ('ddp_dense' is plain DDP, measured)"
            raise refusal("the strategy of CommunicationMonitor", type(strategy).__name__, allowed)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.check_strategy(trainer.strategy)
        if stage == "fit":  # before a checkpoint's state is loaded
            self._reset()
            self._began = time.perf_counter()
            # The totals are rank-local even among a validation's metrics, which Lightning wants synchronized.
            ours = r"It is recommended to use `self\.log\('(comm/total_bytes_sent|time/total_s)'"
            warnings.filterwarnings("ignore", message=ours)

    def state_dict(self) -> dict[str, Any]:
        """Bytes and seconds so far, including the fits that this one continues, as plain numbers."""
        seconds = (self._ended or time.perf_counter()) - self._began if self._began else 0.0
        so_far = {"bytes_sent": self._spent.bytes_sent, "dense_bytes": self._spent.dense_bytes, "seconds": seconds}
        return {name: saved + so_far[name] for name, saved in self._saved.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self._saved = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        averager = averager_of(trainer)
        self._spent, self._steps_seen = averager.spent, averager.steps
        self._counted = type(self._spent)()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        logs = bool(trainer.loggers) and trainer._logger_connector.should_update_logs
        averager_of(trainer).measures_residual = logs
        if not self._elapsed:  # a step begins; what validation has waited for, for example, is no step's
            self._counted.seconds = self._spent.seconds.copy()
        self._begin = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        averager = averager_of(trainer)
        self._elapsed += time.perf_counter() - self._begin
        if averager.steps == self._steps_seen:  # gradients are still accumulating
            return
        stats = self._spent.since(self._counted)  # of several steps, in manual optimization
        self._counted = replace(self._spent)
        compute = self._elapsed - sum(stats.seconds.values()) - stats.norm_seconds
        phases = {"compute": compute, **stats.seconds}
        for phase, times in self._times.items():
            times.append(phases[phase])
        self._steps += averager.steps - self._steps_seen
        self._steps_seen, self._elapsed = averager.steps, 0.0
        ratio = f"comm/ratio_N{averager.world}"
        metrics = {ratio: stats.ratio, **averager.metrics()}
        self._last = {"bytes_sent": stats.bytes_sent, "ratio": metrics[ratio]}
        if trainer._logger_connector.should_update_logs:  # at other steps it would waste milliseconds
            pl_module.log_dict(
                {
                    "comm/bytes_sent": float(stats.bytes_sent),
                    "comm/bytes_received": float(stats.bytes_received),
                    **({} if stats.sparsity is None else {"comm/sparsity": stats.sparsity}),
                    **{f"time/{phase}_ms": 1e3 * seconds for phase, seconds in phases.items()},
                    **self._so_far(),
                    **metrics,
                }
            )
        bar = {"sent_MB": stats.bytes_sent / 1e6, f"ratio(N={averager.world})": metrics[ratio]}
        pl_module.log_dict(bar, prog_bar=True, logger=False)

    def _so_far(self) -> dict[str, float]:
        totals = self.state_dict()
        return {"comm/total_bytes_sent": float(totals["bytes_sent"]), "time/total_s": totals["seconds"]}

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            pl_module.log_dict(self._so_far())

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        averager = averager_of(trainer)
        self._ended = time.perf_counter()
        totals = self.state_dict()
        total = Stats(bytes_sent=totals["bytes_sent"], dense_bytes=totals["dense_bytes"])
        self._summary = {
            "world_size": averager.world,
            **averager.summary(),
            "steps": self._steps,
            "bytes_sent": self._counted.bytes_sent,
            "dense_bytes": self._counted.dense_bytes,
            "ratio": self._counted.ratio,
            "totals": {**totals, "ratio": total.ratio},
            "last_step": self._last,
            "milliseconds": {phase: 1e3 * median(times) if times else 0.0 for phase, times in self._times.items()},
        }
        if self._steps and (why := averager.why_uncompressed()):
            name = type(averager.compressor).__name__
            rank_zero_warn(f"{name} compressed no step of this run: {why}. {help_at('compressed-no-step')}")

    def summary(self) -> dict[str, Any]:
        """This rank's totals over the fit, bytes of the last step, and median milliseconds per step.

        Call it after the fit, in a process that trained. With start_method "spawn", "fork" or "forkserver", the main
        process has no summary. All bytes are gradient bytes; `ratio` is dense bytes over bytes sent. `milliseconds` has
        each phase's median over the latest 1,000 steps. `totals` has bytes, ratio and seconds, including the fits that
        this one continues. With topology="auto", `auto` gives the choice and the reason. For a sharded model, `shards`
        is the number of ranks per replica, and `world_size` the number of replicas. With delayed averages, `rounds` has
        period, delay, and the costs of the fit. With dist_async, `async` counts how often each staleness occurred.

        Raises:
            RuntimeError: if no fit has ended.
        """
        if not self._summary:
            raise RuntimeError("CommunicationMonitor.summary(): no fit with this monitor has ended in this process")
        return self._summary
