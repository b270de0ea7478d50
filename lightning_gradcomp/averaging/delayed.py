"""DelayedAverager: ranks step on their own gradients; averages of what they moved arrive later, at known steps.

The rule and its source are in anchor.py. A round is K steps. At its end a rank sends what it moved in it, and trains
on; D steps later, at that step whenever the message arrived before, the average takes the place of what it had moved by
itself. The network's delay is hidden as long as it is shorter than D steps; where it is not, the step waits. When a
message arrives has no influence on the result. D ≤ K, so that one message at most is under way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_gradcomp.averaging.anchor import Anchor
from lightning_gradcomp.averaging.faults import TIMEOUT, explained
from lightning_gradcomp.averaging.flight import Flight
from lightning_gradcomp.averaging.meter import DelayedStats
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.roll_call import Report
from lightning_gradcomp.averaging.rounds import Rounds
from lightning_gradcomp.averaging.together import Buffers, bring_together, broadcast, reset_lost
from lightning_gradcomp.compressors.base import Compressor
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.outer import PLAIN, Nesterov
from lightning_gradcomp.pace import Pace
from lightning_gradcomp.registry import build


class DelayedAverager:
    """Local steps, and averages of the weights that arrive `delay` steps late: for links with a long delay.

        averager = DelayedAverager(model, optimizer, period=8, delay=8)
        loss.backward()
        averager.step()     # = optimizer.step(); at ends of rounds it sends, `delay` steps later it corrects
        averager.drain()    # before validation, checkpoints and the end: all ranks hold the average

    `period=1, delay=0` is synchronous training, `delay=0` local SGD (FedAvg), `delay=0` with `outer` DiLoCo, and
    `delay > 0` delayed gradient averaging. Between drains each rank's weights are its own: don't evaluate or save them.

    Args:
        model: the bare module (not wrapped in DDP). All ranks start with rank 0's weights and buffers.
        optimizer: any; its state is the rank's own between drains.
        compressor: what becomes of a round's update on its way, with error feedback over rounds.
        period: K, steps in a round, the same on all ranks.
        delay: D, steps from a round's end to its average's arrival, 0 to `period`. "auto": as many as it takes to hide
            the exchange, from what the first rounds have measured; `period` is then the least K.
        process_group: default: a new group of all ranks, in which nothing else waits for a message under way. A process
            without torch.distributed is a world of one, where this is `optimizer.step()`.
        outer: steps on the rounds' mean updates in place of adding them.
        stale_only: apply only averages: weights are the same on all ranks at every step, a round's gradients are all
            taken at the same weights, and everything is applied late.
        steps_per_epoch: lets a compressor's warm-up that counts epochs count them.
        epoch: the epoch to begin with, for a caller that counts epochs itself, in `averager.epoch`.

    Raises:
        ValueError: an option or model that can't be honoured.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        compressor: Compressor | str = "none",
        *,
        period: int = 8,
        delay: int | str = 8,
        process_group: dist.ProcessGroup | None = None,
        outer: Nesterov | None = None,
        stale_only: bool = False,
        steps_per_epoch: int | None = None,
        epoch: int | None = None,
    ) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise refusal("DelayedAverager(model)", "DistributedDataParallel", "the module inside it")
        self.model, self.optimizer = model, optimizer
        self.compressor: Compressor = build(compressor)
        self.pace = Pace(period, delay)
        self.outer, self.stale_only = outer or PLAIN, stale_only
        self.steps_per_epoch, self.epoch = steps_per_epoch, epoch
        if process_group is None and dist.is_initialized():
            process_group = dist.new_group(timeout=TIMEOUT)  # type: ignore[assignment] - of all ranks, so of this one
        self.ranks = Ranks(process_group)
        self.stats = DelayedStats()
        """What it has cost so far."""
        self.steps = 0
        """Optimizer steps so far."""
        self.flag = False
        """What this rank tells the others along with its next round."""
        self.flags = [False] * self.ranks.world
        """What all ranks told with the average, or drain, that came last; the same on all, at the same step."""
        self._flight: Flight[list[Report]] | None = None
        self._step_seconds: list[float] = []
        self._apart = self._exchange_seconds = 0.0
        self._stepped_at: float | None = None
        self._lay_out()
        if self.ranks.world > 1:
            broadcast([*model.parameters(), *model.buffers()], self.ranks)
        self._buffers = Buffers(model)

    def _lay_out(self, state: Mapping[str, Any] | None = None) -> None:
        """Begin, or begin anew from a state: nothing is under way, and nothing left out."""
        self._anchor = Anchor(self.model, stale_only=self.stale_only)
        self._rounds = Rounds(self._anchor, self.compressor, self.ranks.group, self.outer, self._epoch())
        if state:
            self._rounds.load_shared_state(state)
        self._since_drain = self._into_round = self._samples = self._all_samples = 0

    def _epoch(self) -> int | None:
        return self.epoch if self.steps_per_epoch is None else self.steps // self.steps_per_epoch

    @property
    def flagged(self) -> bool:
        """Whether any of `flags` is set."""
        return any(self.flags)

    @property
    def period(self) -> int:
        """K, as it is now."""
        return self.pace.period

    @property
    def delay(self) -> int:
        """D, as it is now."""
        return self.pace.delay

    def step(self, weight: int = 1) -> None:
        """Step the optimizer; at the end of a round send, and when an average is due apply it.

        Args:
            weight: samples in this step, by which averages are weighted. A rank without data calls `step(0)` as often
                as the others step: its optimizer rests, and it receives the averages.
        """
        with self.stepping(weight):
            if weight:
                self.optimizer.step()

    @contextmanager
    def stepping(self, weight: int = 1) -> Iterator[None]:
        """For a caller that steps the optimizer itself: `with averager.stepping(): scaler.step(optimizer)`."""
        if weight < 0:
            raise refusal("weight", weight, "a number of samples, 0 or more")
        if self.ranks.world == 1:
            yield
            self.steps += 1
            self.flags = [self.flag]
            return
        if self._anchor.stale:
            self.drain()
            self._anchor.follow()
        if not self._since_drain:
            self._anchor.begin()  # whatever was done to the weights since the last drain, on all ranks alike
            self._stepped_at = None
        yield
        self.steps += 1
        self._since_drain += 1
        self._into_round += 1
        self._samples += weight
        self._all_samples += weight
        now = time.perf_counter()
        if self._stepped_at is not None:
            self._step_seconds.append(now - self._stepped_at)
        self.stats.dense_bytes += self.ranks.dense_traffic(self._rounds.gradients.flat.nbytes)
        self._anchor.after_step()
        if self._flight:
            self.stats.steps_under_way += not self._flight.arrived
            if self._since_drain == self._flight.due or self._flight.failed:
                self._land()
        if self._into_round == self.period:
            self._send()
            if self.delay == 0:
                self._land()
        self._stepped_at = time.perf_counter()

    def _take_update(self) -> tuple[Report, bool]:
        """Let the anchor's gradients be what the rank's steps have added. The report on it; whether it is finite."""
        finite = self._anchor.take_update()
        if not finite:
            reset_lost(self.optimizer)
        steps = median(self._step_seconds) if self._step_seconds else 0.0
        report = Report(self._samples if finite else 0, self.flag, self._apart, steps, self._exchange_seconds)
        self._samples = self._into_round = 0
        self._step_seconds = []
        return report, finite

    def _send(self) -> None:
        report, _ = self._take_update()
        self._anchor.depart()
        self._rounds.epoch = self._epoch()
        exchange = partial(self._rounds.exchange, report, self.steps)
        self._flight = Flight(exchange, self._since_drain + self.delay, self._rounds.gradients.flat.device)
        self.stats.steps_under_way = 0

    def _land(self) -> None:
        """Apply the average that is due, once it is there."""
        assert self._flight is not None
        flight, self._flight = self._flight, None
        begin, stats = time.perf_counter(), self.stats
        stats.late_rounds += self.delay > 0 and not flight.arrived
        reports = flight.land()
        stats.stall_seconds += time.perf_counter() - begin
        self._exchange_seconds = flight.seconds
        self._rounds.advance()
        self._apart = self._anchor.rejoin()
        stats.rounds += 1
        stats.bytes_sent += self._rounds.stats.bytes_sent
        stats.sparsity = self._rounds.stats.sparsity
        square = sum(report.apart**2 for report in reports) / len(reports)
        stats.apart = square**0.5 / max(self._anchor.length(), 1e-30)
        self.flags = [report.flag for report in reports]
        self.pace.landed(reports)

    def drain(self) -> None:
        """Let all ranks hold the same weights, to the bit. A collective call; nothing to do where no step was made.

        The message under way is awaited, then the open round is averaged as it is (fp32, without outer optimizer), with
        all that compressed rounds have left out, the floating-point buffers that checkpoints hold and the optimizer's
        moments; other buffers are rank 0's. The next round begins here.
        """
        if not self._since_drain:
            return
        with explained(self.steps, "draining delayed averages", self.ranks.group):
            if self._flight:
                self._land()
            begin, sound = time.perf_counter(), True
            if self._into_round or not self._rounds.settled:
                report, sound = self._take_update()
                self.flags = [each.flag for each in self._rounds.settle(report, self.steps)]
                self.stats.bytes_sent += self._rounds.stats.bytes_sent
            self._anchor.rest()
            self._rounds.start_afresh()
            sent = bring_together(self.ranks, self._buffers, self.optimizer, self._all_samples, sound=sound)
            self.stats.bytes_sent += sent
            self._since_drain = self._all_samples = 0
            self.stats.stall_seconds += time.perf_counter() - begin
        self.pace.choose()

    def rest(self) -> bool:
        """Alone, without the others: the weights become what all ranks agreed on last. Local steps since are lost.

        For the checkpoint of an interrupted run, where nobody knows what the other ranks are doing.

        Returns:
            Whether there were such steps.
        """
        if self._since_drain:
            self._anchor.rest()
        return self._since_drain > 0

    def describe(self) -> str:
        """One line for the log."""
        late = "without delay" if self.delay == 0 else f"applied {self.delay} steps later"
        numbers = self._rounds.gradients.flat.numel()
        return (
            f"Averages of {numbers:,} updates ({type(self.compressor).__name__}) every {self.period} steps, {late}"
            f"{' (measuring what the delay should be)' if self.pace.measuring else ''}; N={self.ranks.world}."
        )

    def state_dict(self) -> dict[str, Any]:
        """The state, the same on all ranks: it drains first, so it is a collective call.

        A run that goes on from it, with the model's and the optimizer's states of that moment, equals the one that made
        it, to the bit; in a world of another size too, all that was sent and left out is in the weights.
        """
        self.drain()
        return {"steps": self.steps, "rounds": self._rounds.shared_state(), "pace": self.pace.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. Load the model's and the optimizer's first, the same on all ranks. Collective.

        Raises:
            ValueError: a tensor of another shape than its parameter's.
        """
        if self._flight:
            self._flight.land()  # what is under way is of the run that ends here
            self._flight = None
        self.steps = state["steps"]
        self.pace.load_state_dict(state["pace"])
        self._lay_out(state["rounds"])
        self._buffers = Buffers(self.model)
