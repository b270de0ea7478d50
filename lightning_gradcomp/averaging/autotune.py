"""topology="auto": a trial over the first steps picks the fastest of dense steps and the topologies.

No model of the link predicts how much of a dense exchange backward hides, or what else the processors do meanwhile. So
the trial times the run's own steps, from the end of one averaging to the end of the next. It goes in rounds: a few
steps of each candidate, then more of those that are not clearly slower than the fastest. All ranks count the same steps
and share the times of the slowest rank, so they decide alike.

A schedule's first levels are less sparse than its last, so the trial repeats at a quarter of the density. If dense was
fastest, it tries everything again; otherwise only the topologies, if there are several.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

DENSE = "dense"
CANDIDATES = ("all_gather", "two_phase")
"""Without "server", whose dense pull is never faster than "two_phase"."""


@dataclass(frozen=True)
class TrialRound:
    """A round of a trial.

    Args:
        uncounted: first steps of each candidate, which allocate buffers and fill caches; their times are discarded.
        counted: timed steps of each candidate.
        close: candidates within this factor of the fastest enter the next round.
    """

    uncounted: int
    counted: int
    close: float

    @property
    def steps(self) -> int:
        return self.uncounted + self.counted


ROUNDS = (TrialRound(2, 3, close=2.0), TrialRound(2, 6, close=1.25), TrialRound(2, 8, close=1.0))
"""Over a slow link a dense step takes many times as long, which a few steps show. Other load lasts for seconds and may
affect only one candidate, so close candidates get more steps."""

RETRY = 4
"""A choice holds until the density has fallen by this factor. Encoding takes about as long at any density, so a lower
density seldom changes which candidate is fastest."""


def lower_quartile(seconds: Sequence[float]) -> float:
    """Other load on a machine makes steps longer, never shorter."""
    return sorted(seconds)[len(seconds) // 4]


class Autotune:
    """The trials of one run on one rank. On a GPU, each timed step synchronizes the host with it.

    Args:
        candidates: topologies to choose from.
        clock: returns seconds.
        uncompressed: what a step does that is not compressed: "dense", or another format of dense steps.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        candidates: Sequence[str],
        clock: Callable[[], float] = time.perf_counter,
        uncompressed: str = DENSE,
    ) -> None:
        self.uncompressed = uncompressed
        self._group, self._device, self._topologies, self._clock = group, device, list(candidates), clock
        self._times: dict[str, list[float | None]] = {}
        """Seconds of each candidate's steps in the current round; empty outside a trial."""
        self._dense: list[float | None] = []
        """Seconds of the first dense steps since the last trial, such as a warm-up's, for the next trial to use."""
        self._round = 0
        self._known: dict[str, list[float]] = {}
        """Candidate -> seconds of the slowest rank in each counted step of earlier rounds."""
        self._ended: float | None = None
        self._tried_at: float | None = None
        self.choice: str | None = None
        """The winner of the latest trial: `uncompressed` or a topology."""
        self.outcome = ""
        """The choice in words, with the times."""

    @property
    def compresses(self) -> bool:
        return self.choice not in (None, self.uncompressed)

    @property
    def measuring(self) -> bool:
        return self.choice is None or bool(self._times)

    def choose(self, density: float, affordable: Sequence[str]) -> str:
        """What the next step does: `uncompressed` or a topology. May start a trial.

        Args:
            density: fraction of all elements that the step would send.
            affordable: topologies that would send fewer bytes than a dense step.
        """
        if not affordable:
            return self.uncompressed
        if not self._times:
            if self.choice is not None and self._tried_at is not None and density > self._tried_at / RETRY:
                return self.choice if self.choice == self.uncompressed or self.choice in affordable else affordable[0]
            candidates = [name for name in self._topologies if name in affordable]
            if self.compresses and len(candidates) == 1:
                return candidates[0]
            with_dense = {} if self.compresses else {self.uncompressed: self._dense}
            self._times = {**with_dense, **{name: [] for name in candidates}}
        under_test = next(name for name, times in self._times.items() if len(times) < ROUNDS[self._round].steps)
        return under_test if under_test in (self.uncompressed, *affordable) else self.uncompressed

    def step_ended(self, did: str, density: float) -> bool:
        """Record the time of a step for which `choose` returned `did`. Returns True if it ended a trial. Collective."""
        waiting = not self._times and did == self.uncompressed and not self.compresses
        if not waiting and not self._times:
            self._ended = None
            return False
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now, began = self._clock(), self._ended
        self._ended = now
        times = self._dense if waiting else self._times.get(did)
        steps = ROUNDS[self._round].steps
        if times is None or len(times) == steps:  # another optimizer's step, with nothing to compress
            return False
        times.append(None if began is None else now - began)
        if waiting or any(len(times) < steps for times in self._times.values()):
            return False
        return self._decide(density)

    def _decide(self, density: float) -> bool:
        this = ROUNDS[self._round]
        for name, times in self._times.items():
            counted = [seconds for seconds in times[this.uncounted :] if seconds is not None]
            self._known[name] = self._known.get(name, []) + self._slowest(counted)
        takes = {name: lower_quartile(seconds) for name, seconds in self._known.items()}
        best = min(self._times, key=lambda name: takes[name])
        close = [name for name in self._times if takes[name] < this.close * takes[best]]
        if len(close) > 1:
            self._round, self._times = self._round + 1, {name: [] for name in close}
            return False
        counts = len(self._known[best])
        self._round, self._known, self._times, self._dense, self._tried_at, self.choice = 0, {}, {}, [], density, best
        what = best if best == self.uncompressed else f"compressed ({best})"
        listed = ", ".join(f"{1e3 * seconds:.1f} ms {name}" for name, seconds in takes.items())
        self.outcome = (
            f"Steps are {what} from now on: one takes {listed} (a quarter of {counts} steps took less, of "
            "the slowest rank)"
        )
        return True

    def _slowest(self, seconds: list[float]) -> list[float]:
        """The slowest rank's time for each step."""
        steps = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(steps, op=dist.ReduceOp.MAX, group=self._group)
        return steps.tolist()

    def describe(self) -> str:
        return (
            self.outcome
            or f"The first steps will show what is quickest: {', '.join([self.uncompressed, *self._topologies])}"
        )

    def state_dict(self) -> dict[str, Any]:
        """The latest trial's outcome. A run that resumes in the middle of a trial repeats it."""
        kept = {"tried_at": self._tried_at, "choice": self.choice, "outcome": self.outcome}
        return {"uncompressed": self.uncompressed, **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with another run's outcome. A trial that is under way here starts again."""
        self._round, self._known, self._times, self._dense, self._ended = 0, {}, {}, [], None
        self._tried_at, self.choice, self.outcome = state["tried_at"], state["choice"], state["outcome"]
