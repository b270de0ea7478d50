"""Costs of steps: bytes on the wire and seconds by phase."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch


@dataclass
class Stats:
    """Costs of one or more steps on one rank.

    Args:
        bytes_sent: gradient bytes that left this rank (traffic, including the topology's factor of N); with
            inside="dense", those that left its node.
        bytes_received: gradient bytes that arrived.
        dense_bytes: bytes that a dense fp32 ring all-reduce of the same gradients would have sent, counted alike.
        sparsity: the schedule's sparsity; 0 in a dense step, None in a compressed step of a method without one.
        seconds: host-clock seconds by phase: compress, exchange, decompress.
        residual_to_gradient: L2 norm of the residual after the step, divided by that of the step's gradient, if
            measured. If error feedback works, the ratio settles. If it keeps growing while the gradient does not
            shrink, the compressor sends too little.
        norm_seconds: seconds of that measurement.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    dense_bytes: int = 0
    sparsity: float | None = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: {"compress": 0.0, "exchange": 0.0, "decompress": 0.0})
    residual_to_gradient: float | None = None
    norm_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """Dense traffic divided by actual traffic; 1 if nothing was sent."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0

    def add(self, step: Stats) -> None:
        """Add one step's costs. Sparsity and residual ratio become that step's."""
        self.bytes_sent += step.bytes_sent
        self.bytes_received += step.bytes_received
        self.dense_bytes += step.dense_bytes
        self.norm_seconds += step.norm_seconds
        self.seconds = {phase: seconds + step.seconds[phase] for phase, seconds in self.seconds.items()}
        self.sparsity, self.residual_to_gradient = step.sparsity, step.residual_to_gradient

    def since(self, earlier: Stats) -> Stats:
        """The costs since `earlier`, a copy of these running sums."""
        return replace(
            self,
            bytes_sent=self.bytes_sent - earlier.bytes_sent,
            bytes_received=self.bytes_received - earlier.bytes_received,
            dense_bytes=self.dense_bytes - earlier.dense_bytes,
            norm_seconds=self.norm_seconds - earlier.norm_seconds,
            seconds={phase: seconds - earlier.seconds[phase] for phase, seconds in self.seconds.items()},
        )

    _phase = None
    _began = 0.0

    def now(self, phase: str | None) -> None:
        """Begin a phase of the step, which ends when the next one begins. None: the step's last phase ends."""
        now = time.perf_counter()
        if self._phase is not None:
            self.seconds[self._phase] += now - self._began
        self._phase, self._began = phase, now


def norm(tensors: Sequence[torch.Tensor]) -> float:
    """L2 norm of all tensors as one vector, in fp32; 0 for none. Waits for a GPU."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
