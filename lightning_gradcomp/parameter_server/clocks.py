"""Bounded staleness: how many steps a worker may be ahead of the slowest (Ho et al., NeurIPS 2013, "Stale Synchronous
Parallel")."""

from __future__ import annotations

import math
import threading


class Clocks:
    """The clock of every live worker: the number of steps it has pushed. Thread-safe.

    A worker starts the step that brings its clock to c + 1 only if c - min over live workers <= S, the `staleness`. 0
    is lock step, `math.inf` is free running.
    """

    def __init__(self, staleness: float) -> None:
        self.staleness = staleness
        self._clocks: dict[int, int] = {}
        self._last = math.inf
        self._changed = threading.Condition()

    def join(self, worker: int, clock: int | None = None) -> int:
        """Add a worker at this clock, or at the slowest worker's. Returns its clock."""
        with self._changed:
            start = min(self._clocks.values(), default=0) if clock is None else clock
            self._clocks[worker] = start
            return start

    def leave(self, worker: int) -> None:
        """Remove a worker. The others no longer wait for it."""
        with self._changed:
            self._clocks.pop(worker, None)
            self._changed.notify_all()

    def tick(self, worker: int, flag: bool = False) -> bool:
        """Count a push. Returns True if this was the worker's last step.

        With `flag`, all workers are to stop after the step that the furthest one has begun.
        """
        with self._changed:
            if flag and self._last == math.inf:
                self._last = max(self._clocks.values()) + 1
            self._clocks[worker] += 1
            self._changed.notify_all()
            return self._clocks[worker] >= self._last

    def wait(self, worker: int, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds until the worker may start its next step. Returns True if it may."""
        with self._changed:
            return self._changed.wait_for(lambda: self._may_start(worker), timeout)

    def _may_start(self, worker: int) -> bool:
        # A worker whose connection broke has left: nobody waits for the answer.
        ahead = self._clocks.get(worker, -math.inf) - min(self._clocks.values(), default=0)
        return ahead <= self.staleness
