"""What a step costs beyond its computation, modelled: from a link, a method's own work, and the bytes that travel.

A step is computed, compressed, exchanged and decompressed one after the other, so the times add up; only a dense
exchange, DDP's, hides behind backward in part (`exposed`). An exchange takes a latency for each of its hops, and its
bytes over the bandwidth. What the model leaves out is in docs/will_it_pay.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_gradcomp.averaging.workers import SHORT, SHORT_SUM, dense_traffic

HIDES = 0.6
"""Share of backward behind which DDP hides its exchange: the first bucket of 25 MiB has to be full before it begins."""


@dataclass(frozen=True)
class Link:
    """What joins the ranks, all sending at once.

    Args:
        latency: seconds a smallest message takes from rank to rank, per hop.
        bandwidth: bytes a second that a rank sends while all of them do, in a ring all-reduce.
        gathers: share of it that gathers reach; gloo's fill a slow link less than its all-reduce does.
        busy: share of the sending in which the rank's own processor is at work, and computes nothing meanwhile.
    """

    latency: float
    bandwidth: float
    gathers: float = 1.0
    busy: float = 0.0

    def at(self, bandwidth: float) -> Link:
        """The same ranks on a wire of this bandwidth, of which they use no more than their processors can."""
        used = min(bandwidth, self.bandwidth / self.busy) if self.busy else bandwidth
        return replace(self, bandwidth=used, busy=self.busy * used / self.bandwidth)


@dataclass(frozen=True)
class Work:
    """What a method's arithmetic takes on a rank.

    Args:
        encode: seconds to compress a whole gradient once, memory included.
        decode: seconds to decode one rank's whole payload and add it to the mean.
    """

    encode: float
    decode: float


def compressed_seconds(
    topology: str, sent: int, messages: Sequence[tuple[str, int]], workers: int, link: Link, work: Work
) -> float:
    """Seconds that a compressed step takes beyond its computation.

    Args:
        topology: "all_gather", "two_phase" or "server".
        sent: bytes that a rank sends in the step (`averaging.traffic.traffic`).
        messages: what is exchanged, in order (`averaging.traffic.messages`).
        workers: number of ranks.
    """
    if workers == 1:
        return 0.0
    gathered = sum(size for how, size in messages if how == "gather")
    rings = [size for how, size in messages if how == "maximum" or (how == "mean" and size > SHORT_SUM)]
    by_rings = sum(dense_traffic(size, workers) for size in rings)
    seconds = work.encode + (by_rings + (sent - by_rings) / link.gathers) / link.bandwidth
    hops = 2 * (workers - 1) * len(rings)
    for how, size in messages:
        hops += short_sum_hops(size, workers) if how == "mean" and size <= SHORT_SUM else 0
        hops += gather_hops(size, workers) if how == "gather" and topology == "all_gather" else 0
    if topology == "all_gather":
        decoded = workers - 1 if gathered else 0  # one's own payload is known
    else:
        to_owners = gathered * (workers - 1) / workers
        hops += 1 + gather_hops((sent - to_owners) / (workers - 1), workers)
        decoded = 2  # an N-th of every rank's payload, then every owner's N-th of the mean
        seconds += work.encode / workers if topology == "two_phase" else 0.0
    return seconds + hops * link.latency + decoded * work.decode


def gather_hops(num_bytes: float, workers: int) -> int:
    """Messages that wait for each other when everybody's goes to everybody: as a ring, or at once where it is short."""
    return 1 if num_bytes <= SHORT else workers - 1


def short_sum_hops(num_bytes: int, workers: int) -> int:
    """Messages that wait for each other in a sum which is not a ring (`workers.add`): to who adds up a part, and back.

    Two ranks tell each other everything at once.
    """
    return 1 if workers == 2 else 1 + gather_hops(num_bytes / workers, workers)


def dense_seconds(num_bytes: int, workers: int, link: Link) -> float:
    """Seconds that DDP's exchange of `num_bytes` takes, a ring; how much of it hides, `exposed` says."""
    return 2 * (workers - 1) * link.latency + dense_traffic(num_bytes, workers) / link.bandwidth


def exposed(seconds: float, backward: float, busy: float = 0.0) -> float:
    """Seconds of a dense exchange that DDP does not hide behind `backward`: what keeps the processor busy, and what is
    left of the waiting."""
    return busy * seconds + max(0.0, (1 - busy) * seconds - HIDES * backward)


def bandwidth_to_hide(num_bytes: int, workers: int, latency: float, backward: float) -> float:
    """Bytes a second from which on the dense exchange hides behind `backward`; infinite where its hops alone do not."""
    left = HIDES * backward - 2 * (workers - 1) * latency
    return dense_traffic(num_bytes, workers) / left if left > 0 else float("inf")
