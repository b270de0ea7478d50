"""How payloads travel: the options, their valid combinations, and MXNet's kvstore names.

all_gather is in exchange.py, two_phase and server are in two_phase.py, and auto is in autotune.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_gradcomp.compressors.base import Compressor, LossyCompressor
from lightning_gradcomp.compressors.few_bits import FORMATS
from lightning_gradcomp.errors import refusal

TOPOLOGIES = ("auto", "all_gather", "two_phase", "server")
PARTITIONED = ("two_phase", "server")
INSIDE = ("compressed", "dense")
FALLBACKS = ("none", *FORMATS)


@dataclass(frozen=True)
class Topology:
    """How payloads travel.

    Args:
        name: "all_gather": every worker's payload goes to every worker. "two_phase": the gradient is divided into
            partitions; payloads go to the owners, which send the means back, compressed again. "server": the same with
            dense means. "auto": a trial over the first steps chooses the fastest of dense steps and the first two.
        inside: "compressed": each rank is a worker. "dense": the ranks of a node average densely and form one worker.
            None: "dense" if several nodes have several ranks each, else "compressed".
        fallback: the format of the steps that "auto" does not compress after the warm-up: "none" (fp32) or one of few
            bits.
    """

    name: str = "all_gather"
    inside: str | None = "compressed"
    fallback: str = "none"


KVSTORES: dict[str, Topology] = {
    "device": Topology("server", "compressed"),
    "dist_sync": Topology("server", "dense"),
    "dist_sync_device": Topology("server", "dense"),
}
"""MXNet's kvstore types."""


def resolve(topology: str, inside: str | None, compressor: Compressor, fallback: str = "none") -> Topology:
    """The options as a `Topology`. None means the default, or what a kvstore's name implies."""
    if inside is not None and inside not in INSIDE:
        raise refusal("inside", inside, _listed(INSIDE))
    if inside is not None and topology in KVSTORES:
        raise refusal(f"inside with topology={topology!r}", inside, "None: the kvstore's name implies it")
    if topology == "dist_async":
        raise refusal(
            "topology", topology, f"{_listed(KVSTORES)}: asynchronous push and pull are strategy='dist_async'"
        )
    if topology not in (*TOPOLOGIES, *KVSTORES):
        raise refusal("topology", topology, _listed((*TOPOLOGIES, *KVSTORES)))
    if fallback not in FALLBACKS:
        raise refusal("fallback", fallback, _listed(FALLBACKS))
    if fallback != "none" and topology != "auto":
        raise refusal(f"fallback with topology={topology!r}", fallback, "'none': only topology='auto' falls back")
    if fallback != "none" and not isinstance(compressor, LossyCompressor):
        what = f"fallback with {type(compressor).__name__}"
        raise refusal(what, fallback, "'none': a dense compressor's steps all travel in its own format")
    inside = inside or (None if topology == "auto" else "compressed")
    chosen = KVSTORES.get(topology) or Topology(topology, inside, fallback)
    if (
        chosen.name in PARTITIONED
        and isinstance(compressor, LossyCompressor)
        and (why := compressor.not_partitioned_because)
    ):
        raise refusal(f"topology with {type(compressor).__name__}", topology, f"'auto' or 'all_gather': {why}")
    return chosen


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
