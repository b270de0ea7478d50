"""topology="auto": a model of the link says how messages travel best, a trial whether to compress them at all.

Before the first step the ranks measure their link, and what it takes to compress a gradient and to decode one; what
each topology would take follows (`cost.py`), for every density anew. The figures are the slowest rank's, so all ranks
choose alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lightning_gradcomp.averaging.compression import Compression
from lightning_gradcomp.averaging.cost import Link, Work, compressed_seconds, dense_seconds
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.link import measure_link, measure_work
from lightning_gradcomp.routes import topologies_for

CANDIDATES = ("all_gather", "two_phase")
"""A server's pull is dense: it never beats two phases."""


class Auto:
    """The choice of one run, for the messages of `compression`. To make one is a collective call."""

    def __init__(self, compression: Compression) -> None:
        self._compression, ranks, compressor = compression, compression.ranks, compression.compressor
        assert ranks.group is not None and ranks.between is not None  # nothing to choose where nothing travels
        self.link = measure_link(ranks.between, compression.gradients.flat.device)
        self.work = measure_work(compressor, compression.gradients, ranks.group)
        self._answered: tuple[float, Gradients] | None = None
        self._topology = ""
        self._candidates = [topology for topology in CANDIDATES if topology in topologies_for(compressor)]

    def seconds(self, density: float) -> dict[str, float]:
        """Topology -> seconds that a step at this density would take beyond its computation, by the model."""
        compression = self._compression
        messages, workers = compression.messages(density), compression.ranks.workers
        return {
            topology: compressed_seconds(
                topology, compression.traffic(density, topology), messages, workers, self.link, self.work
            )
            for topology in self._candidates
        }

    def topology(self, density: float) -> str:
        """The quickest, by the model."""
        asked = density, self._compression.gradients
        if self._answered != asked:  # several times a step, and the answer seldom changes
            seconds = self.seconds(density)
            self._answered, self._topology = asked, min(seconds, key=lambda name: seconds[name])
        return self._topology

    def describe(self, density: float) -> str:
        """The choice and its figures."""
        dense = dense_seconds(self._compression.gradients.flat.nbytes, self._compression.ranks.workers, self.link)
        modelled = [f"{name} {1e3 * s:.1f} ms" for name, s in self.seconds(density).items()]
        return (
            f"auto: {self.topology(density)} (modelled: {', '.join(modelled)}, dense exchange {1e3 * dense:.1f} ms, "
            f"from a measured latency of {1e3 * self.link.latency:.2f} ms, {8e-6 * self.link.bandwidth:,.0f} Mbit/s, "
            f"{1e3 * self.work.encode:.1f} ms to compress and {1e3 * self.work.decode:.1f} ms to decode)"
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on from, so that it chooses as this one: plain numbers."""
        return {"link": asdict(self.link), "work": asdict(self.work)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the measured figures."""
        self.link, self.work, self._answered = Link(**state["link"]), Work(**state["work"]), None
