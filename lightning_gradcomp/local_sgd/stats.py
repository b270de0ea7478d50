"""Costs of delayed averaging on one rank: bytes, waits, and the distance between the ranks' weights."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gradcomp.averaging import Stats


@dataclass
class DelayedStats:
    """Costs of one rank's rounds so far.

    Args:
        rounds: averages applied, without those of drains.
        bytes_sent: bytes that left this rank, including drains, without the buffers that rank 0 broadcasts in them.
        dense_bytes: bytes that a dense fp32 ring all-reduce of the gradients at every step would have sent.
        stall_seconds: host time spent waiting for averages and in drains.
        late_rounds: averages whose exchange was not done when they were applied, at their step or in a drain.
        overlapped_steps: steps that ended while the latest exchange was running.
        sparsity: of the latest average, as in `Stats`.
        consensus_distance: root mean square over ranks of the L2 distance between a rank's weights and the average,
            over the L2 norm of the weights. Measured when the weights of the last round but one were sent.
    """

    rounds: int = 0
    bytes_sent: int = 0
    dense_bytes: int = 0
    stall_seconds: float = 0.0
    late_rounds: int = 0
    overlapped_steps: int = 0
    sparsity: float = 0.0
    consensus_distance: float = 0.0

    @property
    def ratio(self) -> float:
        """Dense bytes of all steps over the bytes of their rounds; 1 where nothing is exchanged."""
        return self.dense_bytes / self.bytes_sent if self.bytes_sent else 1.0

    def since(self, earlier: DelayedStats) -> Stats:
        """The difference to `earlier` as the costs of one step. Its exchange time is the time that the step waited."""
        sent = self.bytes_sent - earlier.bytes_sent
        stats = Stats(bytes_sent=sent, bytes_received=sent, dense_bytes=self.dense_bytes - earlier.dense_bytes)
        stats.sparsity = self.sparsity
        stats.seconds["exchange"] = self.stall_seconds - earlier.stall_seconds
        return stats
