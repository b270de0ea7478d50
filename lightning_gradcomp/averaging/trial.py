"""Whether compression pays here, found by trying: `topology="auto"`.

How much of a dense exchange hides behind backward, and what else the processors have to do meanwhile, no model of the
link can know. So a run's own steps are timed, from the end of one averaging to the end of the next: a few dense ones,
then a few compressed ones, and where both take about as long, the same once more. If the compressed ones are not
quicker, the run goes on dense. All ranks count the same steps and share the times of the slowest, so they decide alike.

A schedule's first levels are less sparse than its last: where one has lost, one of half its density is tried again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

UNCOUNTED = 4
"""Steps of either kind before those that count: buffers and buckets are made in them, and caches filled."""

COUNTED = 8

CLOSE = 1.25
"""Where one takes less than so many times as long as the other, there is a second round: a machine's moods last for
seconds, and may have met one of them alone."""


def quick(seconds: list[float]) -> float:
    """The lower quartile: whatever else a machine does makes steps longer, and none shorter."""
    return sorted(seconds)[len(seconds) // 4]


class Trial:
    """The books of one run's trials on one rank.

    Args:
        group: the ranks.
        device: where they compute; a GPU is waited for while its steps are timed.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self._dense: list[float | None] = []
        self._compressed: list[float | None] = []
        self._first_round: list[list[float]] = []
        self._ended: float | None = None
        self._lost_at: float | None = None
        self.won = False
        """Whether it is known that compression pays."""
        self.outcome = ""
        """What the latest trial has found, in words."""

    @property
    def lost(self) -> bool:
        """Whether compression did not pay in the latest trial."""
        return self._lost_at is not None

    def allows(self, density: float) -> bool:
        """Whether the coming step may send `density` of everything; the dense ones to compare with come first."""
        if self._lost_at is not None and density > self._lost_at / 2:
            return False
        return self.won or len(self._dense) == UNCOUNTED + COUNTED

    def step_ended(self, density: float) -> bool:
        """Book a step that has sent `density` of everything, 1 in a dense one. A collective call.

        Returns:
            Whether it was the one that decides.
        """
        steps = self._dense if density == 1 else self._compressed
        if self.won or len(steps) == UNCOUNTED + COUNTED:
            self._ended = None
            return False
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        steps.append(None if self._ended is None else now - self._ended)
        self._ended = now
        if len(self._compressed) < UNCOUNTED + COUNTED:
            return False

        return self._decide(density)

    def _decide(self, density: float) -> bool:
        own = [[s for s in steps[UNCOUNTED:] if s is not None] for steps in (self._dense, self._compressed)]
        slowest = [self._slowest(seconds) for seconds in own]
        known = [earlier + now for earlier, now in zip(self._first_round or [[], []], slowest, strict=True)]
        dense, compressed = (1e3 * quick(seconds) for seconds in known)
        self._dense, self._compressed = [], []
        if not self._first_round and max(dense, compressed) < CLOSE * min(dense, compressed):
            self._first_round = known
            return False
        self._first_round = []
        self.won = compressed < dense
        self._lost_at = None if self.won else density
        self.outcome = (
            f"Steps are {'compressed' if self.won else 'dense'} from now on: one takes {compressed:.1f} ms compressed "
            f"and {dense:.1f} ms dense (a quarter of {len(known[1])} steps took less, of the slowest rank)"
        )
        return True

    def _slowest(self, seconds: list[float]) -> list[float]:
        """Of each step, the time of the rank that took the longest."""
        steps = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(steps, op=dist.ReduceOp.MAX, group=self._group)
        return steps.tolist()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on from, so that it decides as this one: plain numbers."""
        return {
            "dense": list(self._dense),
            "compressed": list(self._compressed),
            "first_round": list(self._first_round),
            "lost_at": self._lost_at,
            "won": self.won,
            "outcome": self.outcome,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace everything."""
        self._dense, self._compressed = list(state["dense"]), list(state["compressed"])
        self._first_round = list(state["first_round"])
        self._lost_at, self.won, self.outcome = state["lost_at"], state["won"], state["outcome"]
