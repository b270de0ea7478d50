"""What steps cost: bytes over the wire, seconds by phase."""

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
