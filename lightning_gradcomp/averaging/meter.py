"""What steps cost: bytes over the wire, seconds by phase; and what rounds cost, whose averages come later."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Stats:
    """One step of one rank.

    Args:
        bytes_sent: bytes of gradients that left this rank (traffic: the topology's factor of N is in it); with
            inside="dense", those that left its node.
        bytes_received: bytes that arrived.
        dense_bytes: what a dense fp32 ring all-reduce of the same gradients would have sent, on the same terms.
        sparsity: what the schedule asked for, 0 in a dense step.
        seconds: by phase: compress, exchange, decompress. Host clock.
        residual_to_gradient: where it was asked for (`averaging/weighing.py`), and something is remembered.
        weighing_seconds: what that has taken.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    dense_bytes: int = 0
    sparsity: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: {"compress": 0.0, "exchange": 0.0, "decompress": 0.0})
    residual_to_gradient: float | None = None
    weighing_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """Dense traffic over this step's traffic; 1 where nothing is exchanged."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to phase `name`."""
        begin = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - begin


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


@dataclass
class DelayedStats:
    """What one rank's rounds have cost so far.

    Args:
        rounds: averages that have arrived; those of drains are not in it.
        bytes_sent: bytes that left this rank, drains included, but for buffers that rank 0 hands on in them.
        dense_bytes: what a dense fp32 ring all-reduce of the gradients at every step would have sent.
        stall_seconds: host time spent waiting for averages and in drains.
        late_rounds: averages that were still on their way at the step where they were due.
        steps_under_way: ends of steps that the latest average has seen on its way.
        sparsity: of the latest average, as in `Stats`.
        apart: how far ranks' weights were from what all agreed on when they sent the last round but one, as a root mean
            square over the ranks and a share of the weights' length.
    """

    rounds: int = 0
    bytes_sent: int = 0
    dense_bytes: int = 0
    stall_seconds: float = 0.0
    late_rounds: int = 0
    steps_under_way: int = 0
    sparsity: float = 0.0
    apart: float = 0.0

    @property
    def ratio(self) -> float:
        """Dense traffic of all steps over the traffic of their rounds; 1 where nothing is exchanged."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0

    def since(self, earlier: DelayedStats) -> Stats:
        """What was booked after `earlier`, as that of one step: the wait is its exchange."""
        sent = self.bytes_sent - earlier.bytes_sent
        stats = Stats(bytes_sent=sent, bytes_received=sent, dense_bytes=self.dense_bytes - earlier.dense_bytes)
        stats.sparsity = self.sparsity
        stats.seconds["exchange"] = self.stall_seconds - earlier.stall_seconds
        return stats
