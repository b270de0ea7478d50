"""DelayedAverager: each rank steps on its own gradients and applies the averages of updates later, at fixed steps.

A round is K steps. At the end of a round each rank sends its update, the sum of its optimizer's steps in the round, and
continues to train. D steps later the mean update replaces the rank's own. The exchange is hidden if it takes less than
D steps; otherwise the step waits. The result does not depend on when a message arrives. D ≤ K, so only one exchange is
in flight at a time. The update rule and its source are in `anchor.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_gradcomp.averaging.checkpoint_state import check_entries
from lightning_gradcomp.averaging.faults import TIMEOUT, explained
from lightning_gradcomp.averaging.replicas import broadcast, broadcast_unless_identical, initial_tensors
from lightning_gradcomp.averaging.stats import Stats
from lightning_gradcomp.averaging.trainable import check_none_ignored, parameters_of
from lightning_gradcomp.compressors.base import Compressor, LossyCompressor, build, check_no_clipping
from lightning_gradcomp.compressors.schedules import dense_start
from lightning_gradcomp.errors import check_share, refusal
from lightning_gradcomp.local_sgd.anchor import Anchor
from lightning_gradcomp.local_sgd.background import BackgroundExchange
from lightning_gradcomp.local_sgd.optimizer_state import zero_nonfinite_state
from lightning_gradcomp.local_sgd.rounds import PLAIN_AVERAGING, Nesterov, RoundReport, Rounds
from lightning_gradcomp.local_sgd.schedule import Participants, RoundSchedule
from lightning_gradcomp.local_sgd.sync import Buffers, sync_buffers_and_moments, sync_copies, tensors_of, untrained

TYPES = {"steps": int, "rounds_ended": int, "rounds": dict, "round_schedule": dict}
"""Keys and types of `DelayedAverager.state_dict`."""


@dataclass
class RoundStats(Stats):
    """Costs of all steps so far. Bytes cover rounds and drains, but not the buffers that rank 0 broadcasts.

    `dense_bytes` is what a dense ring all-reduce at every step would have sent. `seconds["exchange"]` is the time that
    steps and drains have waited. `consensus_distance` is the root mean square over ranks of the L2 distance between a
    rank's weights and the average, divided by the L2 norm of the weights, as sent in the last round but one.
    """

    rounds: int = 0  # averages applied, not counting those of drains
    late_rounds: int = 0  # averages whose exchange was still running when they were due, at their step or in a drain
    overlapped_steps: int = 0  # steps that ended while the latest exchange was running
    consensus_distance: float = 0.0

    @property
    def stall_seconds(self) -> float:
        """Time that steps and drains have waited."""
        return self.seconds["exchange"]

    def add_bytes(self, sent: int) -> None:
        """Count `sent` bytes as both sent and received by this rank."""
        self.bytes_sent += sent
        self.bytes_received += sent

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Add the time spent inside to the time that steps have waited. Nested blocks count once."""
        before, begin = self.seconds["exchange"], perf_counter()
        yield
        self.seconds["exchange"] = before + perf_counter() - begin


class DelayedAverager:
    """Local steps, with averages of the weights applied `delay` steps late: for high-latency links.

        averager = DelayedAverager(model, optimizer, period=8, delay=8)
        loss.backward()
        averager.step()     # = optimizer.step(); sends at the end of a round, applies the average `delay` steps later
        averager.drain()    # before validation, checkpoints and the end: all ranks hold the average

    `period=1, delay=0` is synchronous training, `delay=0` local SGD (FedAvg), `delay=0` with `outer` DiLoCo,
    `**SPARSELOCO` SparseLoCo, and `delay > 0` delayed gradient averaging. Between drains each rank has its own weights:
    don't evaluate or save them.

    Args:
        model: the bare module, not wrapped in DDP. All ranks start with rank 0's weights and buffers.
        optimizer: any torch optimizer, or a list of several. Between drains its state is local to the rank. One step of
            a round is one `step`, in which each of several may step, or a block of `stepping`.
        compressor: compresses the update of each round, with error feedback over rounds.
        period, delay, outer, pending_share, participation, error_decay: as for `DelayedStrategy`.
        process_group: default: a new group of all ranks, so that no other collective waits for the exchange. Without
            torch.distributed there is one rank, and `step` is `optimizer.step()`.
        steps_per_epoch: needed by a compressor whose warm-up counts epochs.
        epoch: the first epoch, for a caller that sets `averager.epoch` itself.

    Raises:
        ValueError: if an option is invalid or the model is not supported.
    """

    measures_residual = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        compressor: Compressor | str = "none",
        *,
        period: int = 8,
        delay: int | str = 8,
        process_group: dist.ProcessGroup | None = None,
        outer: Nesterov | None = None,
        pending_share: float | None = None,
        participation: float = 1.0,
        error_decay: float | None = None,
        steps_per_epoch: int | None = None,
        epoch: int | None = None,
    ) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise refusal("DelayedAverager(model)", "DistributedDataParallel", "the module inside it")
        self.round_schedule, self.participants = RoundSchedule(period, delay), Participants(participation)
        check_share("pending_share", pending_share)
        self._pending_share = pending_share
        self.model = model
        self.optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        check_none_ignored(model, "DelayedAverager")
        if foreign := len({*parameters_of(*self.optimizers)} - {*model.parameters()}):
            allowed = "only the model's, whose steps are averaged"
            raise refusal("the optimizer's parameters in DelayedAverager", f"{foreign} outside the model", allowed)
        self.compressor: Compressor = build(compressor)
        check_no_clipping(self.compressor, "in rounds of local steps")
        self.outer, self.error_decay = outer or PLAIN_AVERAGING, error_decay
        self.steps_per_epoch, self.epoch = steps_per_epoch, epoch
        self.spent = RoundStats()
        """Costs so far."""
        self.steps = 0
        """Optimizer steps so far."""
        self.flag = False
        """A flag that is sent to the other ranks with the next round or drain."""
        self._rounds_ended = 0
        self._pending: BackgroundExchange[list[RoundReport]] | None = None
        self._step_seconds: list[float] = []
        self._distance = self._exchange_seconds = 0.0
        self._step_ended: float | None = None
        if process_group is None and dist.is_initialized():
            process_group = dist.new_group(timeout=TIMEOUT)  # type: ignore[assignment] - includes this rank
        self._start(process_group)
        self.flags = [False] * self.world
        """The flags of all ranks from the latest average or drain. They change at the same step on all ranks."""
        self._is_single = self.world == 1
        if not self._is_single:
            broadcast_unless_identical(initial_tensors(model), self.ranks)
        self._buffers = Buffers(model)
        self.averages: Sequence[nn.Module] = ()
        """Moving averages of the model, kept outside of it, that a drain makes the same on all ranks."""

    def _start(self, group: dist.ProcessGroup | None, state: Mapping[str, Any] | None = None) -> None:
        """Start from the model's weights and the rounds' `state`, with no exchange pending."""
        self._anchor = Anchor(self.model)
        self.rounds = Rounds(
            self._anchor,
            self.compressor,
            group,
            outer=self.outer,
            epoch=self._current_epoch(),
            local_optimizers=self.optimizers,
            error_decay=self.error_decay,
            period=self.round_schedule.shortest,
        )
        """Averages the updates; its `state_dict` is this rank's own state."""
        if state:
            self.rounds.load_shared_state(state)
        self.ranks, self.world = self.rounds.ranks, self.rounds.world
        self._steps_since_drain = self._steps_in_round = 0
        self._samples_in_round = self._samples_since_drain = 0

    def _current_epoch(self) -> int | None:
        return self.epoch if self.steps_per_epoch is None else self.steps // self.steps_per_epoch

    @property
    def flagged(self) -> bool:
        """True if any of `flags` is set."""
        return any(self.flags)

    @property
    def period(self) -> int:
        """K, the current period in steps."""
        return self.round_schedule.period

    @property
    def delay(self) -> int:
        """D, the current delay in steps."""
        return self.round_schedule.delay

    @property
    def pending_share(self) -> float:
        """Fraction of a rank's own update that its weights contain while the average is pending."""
        if self._pending_share is not None:
            return self._pending_share
        adam = any(isinstance(each, torch.optim.Adam | torch.optim.AdamW) for each in self.optimizers)
        return 0.5 if adam and self.world > 1 else 1.0

    @property
    def resting(self) -> bool:
        """True if this rank was not drawn for the current round."""
        return self.ranks.rank not in self.participants.of_round(self._rounds_ended, self.world)

    # Steps

    def step(self, weight: int = 1) -> None:
        """Step the optimizers in their order. Send the update at the end of a round, and apply an average that is due.

        Args:
            weight: number of samples in this step, which weights the update in averages. A rank without data calls
                `step(0)` whenever the others call `step`: its optimizer does not step, but it applies the averages.

        Raises:
            ValueError: if a parameter is frozen on some ranks only.
            ExchangeFailed: if the other ranks can't be reached, or are at a different step.
        """
        with self.stepping(weight):
            if weight and not self.resting:
                for optimizer in self.optimizers:
                    optimizer.step()

    @contextmanager
    def stepping(self, weight: int = 1) -> Iterator[None]:
        """Like `step`, but the caller steps the optimizers: `with averager.stepping(): scaler.step(optimizer)`.

        Do not step them while the averager is `resting`.
        """
        if weight < 0:
            raise refusal("weight", weight, "a number of samples, 0 or more")
        self.begin_step()
        yield
        self.end_step(weight)

    def begin_step(self) -> None:
        """The part of `stepping` before the block, for a caller that does not know yet if an optimizer will step."""
        if self._is_single:
            return
        if self._anchor.trainable_changed:
            self.drain()  # updates have another layout from here on
            self._anchor.refresh_trainable()
        if not self._steps_since_drain:
            self._anchor.copy_from_model()  # the caller may have changed the weights, identically on all ranks
            self._step_ended = None

    def end_step(self, weight: int = 1) -> None:
        """The part of `stepping` after the block."""
        self.steps += 1
        if self._is_single:
            self.flags = [self.flag]
            return
        self._steps_since_drain += 1
        self._steps_in_round += 1
        self._samples_in_round += 0 if self.resting else weight
        self._samples_since_drain += weight
        now = perf_counter()
        if self._step_ended is not None:
            self._step_seconds.append(now - self._step_ended)
        self.spent.dense_bytes += self.ranks.dense_traffic(4 * self._anchor.num_elements)
        if self._pending:
            self.spent.overlapped_steps += not self._pending.done
            if self._steps_since_drain == self._pending.due or self._pending.failed:
                self._apply(self._receive())
        if self._steps_in_round == self.period:
            self._send_update()
            if self.delay == 0:
                self._apply(self._receive())
        self._step_ended = perf_counter()

    def _close_round(self) -> tuple[RoundReport, bool]:
        """Set the anchor's pseudo-gradients. Returns this rank's report, and True if the update is finite."""
        finite = self._anchor.set_pseudo_gradients()
        if not finite:
            zero_nonfinite_state(self.optimizers)
        report = self._report(self._samples_in_round if finite else 0)
        self._samples_in_round = self._steps_in_round = 0
        self._rounds_ended += 1
        self._step_seconds = []
        return report, finite

    def _report(self, samples: int) -> RoundReport:
        step_seconds = median(self._step_seconds) if self._step_seconds else 0.0
        frozen = tuple(not parameter.requires_grad for parameter in self._anchor.live.values())
        measured = self._distance, step_seconds, self._exchange_seconds
        return RoundReport(samples, self.flag, *measured, self.steps, frozen)

    def _send_update(self) -> None:
        """Start the exchange of the round that ends here."""
        report, _ = self._close_round()
        self._anchor.snapshot_model(self.pending_share)
        exchange = partial(self.rounds.exchange, report, self.steps, self._current_epoch())
        self._pending = BackgroundExchange(exchange, self._steps_since_drain + self.delay, self._anchor.device)
        self.spent.overlapped_steps = 0

    def _receive(self) -> list[RoundReport]:
        """Wait for the pending exchange. Returns the reports of all ranks."""
        assert self._pending is not None
        exchange, self._pending = self._pending, None
        self.spent.late_rounds += self.delay > 0 and not exchange.done
        with self.spent.stalled():
            reports = exchange.wait()
        self._exchange_seconds = exchange.seconds
        return reports

    def _apply(self, reports: Sequence[RoundReport]) -> None:
        """Apply the average just received."""
        self.rounds.step_outer_optimizer()
        self._distance = self._anchor.apply_average()
        spent = self.spent
        spent.rounds += 1
        spent.add_bytes(self.rounds.bytes_sent)
        spent.sparsity = self.rounds.averager.stats.sparsity
        mean_square = sum(report.distance**2 for report in reports) / len(reports)
        spent.consensus_distance = mean_square**0.5 / max(self._anchor.norm(), 1e-30)
        self.flags = [report.flag for report in reports]
        self.round_schedule.round_applied(reports)

    # Drains

    def drain(self) -> None:
        """Make the weights bit-identical on all ranks. Collective; does nothing if no step was taken since the last.

        Waits for the pending exchange and applies its average. Then averages the open round and all residuals in fp32,
        without the outer optimizer. Averages the floating-point buffers in the `state_dict` and the optimizers'
        moments and counts, and copies other buffers from rank 0. Averages frozen parameters, such as a teacher's, and
        `averages`, if they differ. The next round starts here.

        With `error_decay`, the open round is averaged like any other, and each rank keeps its optimizers' state and its
        residual.

        Raises as `step`.
        """
        if not self._steps_since_drain:
            return
        doing = "draining delayed averages"
        with explained(self.steps, doing, self.ranks.group):
            if self._pending:
                self._apply(self._receive())
            with self.spent.stalled():
                finite = self._average_open_round(doing)
                self._anchor.reset_model()
                samples, averaged = self._samples_since_drain, self.optimizers if self.error_decay is None else []
                sent = sync_buffers_and_moments(self.ranks, self._buffers, averaged, samples, moments_valid=finite)
                copies = [*untrained(self.model, self._anchor.trained), *tensors_of(self.averages)]
                sent += sync_copies(self.ranks, copies, self._anchor.device)
                self.spent.add_bytes(sent)
                self._steps_since_drain = self._samples_since_drain = 0
        if self.outer != PLAIN_AVERAGING and not self.spent.rounds and self.ranks.rank == 0:
            warnings.warn(
                f"the outer optimizer has made no step: no round of {self.period} steps ended before this drain, which "
                "closes the open round without it. Choose a period no longer than the steps between drains (an epoch).",
                stacklevel=2,
            )
        self.round_schedule.set_delay()

    def share_buffers(self) -> None:
        """Copy rank 0's buffers in the `state_dict` to all ranks. Collective.

        A drain averages buffers. This is for forward passes since the last drain, without steps.
        """
        if not self._is_single:
            broadcast(self._buffers.current(), self.ranks)

    def _average_open_round(self, doing: str) -> bool:
        """Average the open round. Returns False if this rank's update is not finite."""
        finite = True
        if self.error_decay is not None and self._steps_in_round:
            self._send_update()
            self._apply(self._receive())
            return True
        if self.error_decay is None and (self._steps_in_round or self.rounds.averager.has_unsent):
            report, finite = self._close_round()
            reports = self.rounds.exchange_uncompressed(report, self.steps)
        else:
            reports = self.rounds.gather_reports(self._report(0), doing)
        self.flags = [report.flag for report in reports]
        self.spent.add_bytes(self.rounds.bytes_sent)
        return finite

    def reset_to_last_average(self) -> bool:
        """Set the weights to the latest average, without communication. Returns True if that discards local steps.

        For the checkpoint of an interrupted run, in which the other ranks may not answer.
        """
        if self._steps_since_drain:
            self._anchor.reset_model()
        return self._steps_since_drain > 0

    # Log

    def describe(self) -> str:
        """One line for the log."""
        late = "without delay" if self.delay == 0 else f"applied {self.delay} steps later"
        first = f"{start} first; " if (start := dense_start(self.rounds.averager.schedule, "round")) else ""
        return (
            f"Averages {self._anchor.num_elements:,} weights ({type(self.compressor).__name__}) every {self.period} "
            f"steps, {late}{' (the delay is being measured)' if self.round_schedule.measuring else ''}; "
            f"{first}N={self.world}."
        )

    def metrics(self) -> dict[str, float]:
        """Metrics of the rounds, and the compression ratio over all steps so far."""
        names = ("overlapped_steps", "late_rounds", "consensus_distance")
        rounds = {f"dga/{name}": float(getattr(self.spent, name)) for name in names}
        return {f"comm/ratio_N{self.world}": self.spent.ratio, **rounds}

    def summary(self) -> dict[str, Any]:
        """Period, delay, and the costs of all rounds."""
        names = ("rounds", "bytes_sent", "dense_bytes", "stall_seconds", "late_rounds", "overlapped_steps", "sparsity")
        costs = {name: getattr(self.spent, name) for name in (*names, "consensus_distance")}
        return {"rounds": {"period": self.period, "delay": self.delay, **costs}}

    def why_uncompressed(self) -> str:
        """The reason why no round was compressed; empty if one was, or if there is nothing to compress."""
        if isinstance(self.compressor, LossyCompressor) and self.world > 1 and not self.spent.rounds:
            return f"no round of {self.period} steps ended before a drain"
        return self.rounds.averager.why_uncompressed("round")

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The state, the same on all ranks. Collective: it drains first.

        A run that resumes from it, with the model's and the optimizers' state after the drain, is bit-identical to the
        original run. The number of ranks may change.

        With `error_decay`, the entry "rounds" is local to each rank: its optimizers' state and its residual. A
        different number of ranks resumes from the mean, `averaging.mean_state` of all ranks' "rounds".
        """
        self.drain()
        rounds, schedule = self.rounds.shared_state(), self.round_schedule.state_dict()
        ended = self._rounds_ended
        return {"steps": self.steps, "rounds_ended": ended, "rounds": rounds, "round_schedule": schedule}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`. Collective. Load the model's and the optimizers' first, the same on all ranks."""
        what, allowed = "the state of DelayedAverager", "what DelayedAverager.state_dict() returned, unchanged"
        check_entries(state, TYPES, what, allowed)
        if self._pending:
            self._pending.wait()  # its result is dropped
            self._pending = None
        self.steps, self._rounds_ended = state["steps"], state["rounds_ended"]
        self.round_schedule.load_state_dict(state["round_schedule"])
        self._start(self.ranks.group, state["rounds"])
        self._buffers = Buffers(self.model)
