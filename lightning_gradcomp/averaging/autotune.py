"""topology="auto": a trial in the first steps finds what is quickest here, among dense steps and the topologies.

How much of a dense exchange hides behind backward, and what else the processors have to do meanwhile, no model of the
link can know. So a run's own steps are timed, from the end of one averaging to the end of the next, in rounds: a few of
each candidate, and more of those that are not clearly slower than the quickest. All ranks count the same steps and
share the times of the slowest, so they decide alike.

A schedule's first levels are less sparse than its last. Where dense was quickest, everything is tried again at a
quarter of the density; where a topology was, the topologies are, if there are several.
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
"""A server's pull is dense: it is never quicker than two phases."""


@dataclass(frozen=True)
class TrialRound:
    """A round of a trial.

    Args:
        uncounted: steps of each candidate before those that count: buffers and buckets are made in them, and caches
            filled.
        counted: steps that are timed.
        close: candidates that take less than so many times as long as the quickest are in the next round.
    """

    uncounted: int
    counted: int
    close: float

    @property
    def steps(self) -> int:
        """Of each candidate."""
        return self.uncounted + self.counted


ROUNDS = (TrialRound(2, 3, close=2.0), TrialRound(2, 6, close=1.25), TrialRound(2, 8, close=1.0))
"""Over a slow link a dense step takes many times as long, which a few steps show. Load from elsewhere lasts for
seconds, and may affect one candidate alone: the closer they are, the more steps decide."""

RETRY = 4
"""What was found holds until the density has fallen by this factor. Encoding takes about as long at any density, so
fewer entries seldom change what is quickest."""


def lower_quartile(seconds: Sequence[float]) -> float:
    """Whatever else a machine does makes steps longer, and none shorter."""
    return sorted(seconds)[len(seconds) // 4]


class Autotune:
    """The trials of one run on one rank.

    Args:
        group: the ranks.
        device: where they compute; a GPU is waited for while its steps are timed.
        candidates: topologies to choose from.
        clock: seconds.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        candidates: Sequence[str],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._group, self._device, self._topologies, self._clock = group, device, list(candidates), clock
        self._times: dict[str, list[float | None]] = {}
        """Seconds of the steps of each candidate in the trial under way; empty where there is none."""
        self._dense: list[float | None] = []
        """Of the first dense steps since the last trial, of a warm-up for example, for the next one."""
        self._round = 0
        self._known: dict[str, list[float]] = {}
        """Seconds of the slowest rank in each step that counted in the rounds before."""
        self._ended: float | None = None
        self._tried_at: float | None = None
        self.choice: str | None = None
        """What the latest trial has found quickest: "dense" or a topology."""
        self.outcome = ""
        """The same in words, with the figures."""

    @property
    def measuring(self) -> bool:
        """Whether steps are timed at the moment."""
        return self.choice is None or bool(self._times)

    def choose(self, density: float, affordable: Sequence[str]) -> str:
        """What the coming step, which would send `density` of everything, does: "dense", or a topology.

        Args:
            affordable: the topologies that would send fewer bytes than a dense step.
        """
        if not affordable:
            return DENSE
        if not self._times:
            if self.choice is not None and self._tried_at is not None and density > self._tried_at / RETRY:
                return self.choice if self.choice == DENSE or self.choice in affordable else affordable[0]
            candidates = [name for name in self._topologies if name in affordable]
            if self.choice not in (None, DENSE) and len(candidates) == 1:
                return candidates[0]
            with_dense = {DENSE: self._dense} if self.choice in (None, DENSE) else {}
            self._times = {**with_dense, **{name: [] for name in candidates}}
        under_test = next(name for name, times in self._times.items() if len(times) < ROUNDS[self._round].steps)
        return under_test if under_test in (DENSE, *affordable) else DENSE

    def step_ended(self, did: str, density: float) -> bool:
        """Record the time of a step. A collective call.

        Args:
            did: what `choose` has returned for it.
            density: share of everything that it would have sent compressed.

        Returns:
            Whether it was the one that decides.
        """
        waiting = not self._times and did == DENSE and self.choice in (None, DENSE)
        if not waiting and not self._times:
            self._ended = None
            return False
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now, began = self._clock(), self._ended
        self._ended = now
        times = self._dense if waiting else self._times.get(did)
        steps = ROUNDS[self._round].steps
        if times is None or len(times) == steps:  # another optimizer's, with nothing to compress
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
        what = "dense" if best == DENSE else f"compressed ({best})"
        listed = ", ".join(f"{1e3 * seconds:.1f} ms {name}" for name, seconds in takes.items())
        self.outcome = (
            f"Steps are {what} from now on: one takes {listed} (a quarter of {counts} steps took less, of "
            "the slowest rank)"
        )
        return True

    def _slowest(self, seconds: list[float]) -> list[float]:
        """Of each step, the time of the rank that took the longest."""
        steps = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(steps, op=dist.ReduceOp.MAX, group=self._group)
        return steps.tolist()

    def describe(self) -> str:
        """The outcome, or what is under way."""
        return self.outcome or f"The first steps will show what is quickest: {', '.join([DENSE, *self._topologies])}"

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on from, so that it decides as this one: plain numbers and words."""
        return {
            "dense": list(self._dense),
            "times": {name: list(times) for name, times in self._times.items()},
            "round": self._round,
            "known": {name: list(times) for name, times in self._known.items()},
            "tried_at": self._tried_at,
            "choice": self.choice,
            "outcome": self.outcome,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace everything."""
        self._dense = list(state["dense"])
        self._times = {name: list(times) for name, times in state["times"].items()}
        self._round, self._known = state["round"], {name: list(times) for name, times in state["known"].items()}
        self._tried_at, self.choice, self.outcome = state["tried_at"], state["choice"], state["outcome"]
        self._ended = None
