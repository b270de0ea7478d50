"""How payloads travel: the options, the bytes that a step sends, and the decision for each step.

all_gather is in exchange.py, two_phase and server are in two_phase.py, and auto is in autotune.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from lightning_gradcomp.averaging.autotune import CANDIDATES, DENSE, Autotune
from lightning_gradcomp.averaging.exchange import CALLER_FLAGS, Frame
from lightning_gradcomp.averaging.few_bits import few_bits_traffic, number_of_owners
from lightning_gradcomp.averaging.gradients import Gradients, Layouts
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.two_phase import split_dense
from lightning_gradcomp.compressors.base import Compressor, LossyCompressor
from lightning_gradcomp.compressors.blocks import FORMATS
from lightning_gradcomp.compressors.kernels.formats import BITS
from lightning_gradcomp.errors import refusal

TOPOLOGIES = ("auto", "all_gather", "two_phase", "server")
PARTITIONED = ("two_phase", "server")
INSIDE = ("compressed", "dense")
FALLBACKS = ("none", *FORMATS)


@dataclass(frozen=True)
class Topology:
    """How payloads travel; for the options see `GradientAverager`."""

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


# Bytes


def messages(compressor: LossyCompressor, gradients: Layouts) -> list[tuple[str, int]]:
    """The messages of a step without partitions, in order: pairs of "gather", "mean" or "maximum", and bytes.

    The extras travel with the first gather or mean, or in a separate gather.
    """
    dense, flags, found = gradients.dense_layout.n, _flags(gradients), []
    for how, payload in [*compressor.messages(gradients.layout), ("finish", 0)]:
        if how == "maximum":
            found.append((how, payload))
        elif how == "mean":
            found.append((how, payload + 4 * (dense + flags)))
            dense = flags = 0  # sent
        elif flags:
            found.append(("gather", Frame(dense, compressor.dense_values, payload, flags).length))
            dense = flags = 0
        elif how == "gather":
            found.append((how, payload))
    return found


def dense_step_traffic(gradients: Layouts, ranks: Ranks, wire: str) -> int:
    """Bytes that a plain dense step sends between workers: those of a ring all-reduce, or of `mean_in_few_bits`."""
    if form := FORMATS.get(wire):
        return few_bits_traffic(form, gradients.layout.shapes, gradients.dense_layout.n, ranks)
    return ranks.dense_traffic(gradients.nbytes) * BITS[wire] // 32


def dense_topology(wire: str, ranks: Ranks) -> str:
    """How a plain dense step travels."""
    if wire not in FORMATS:
        return "all_reduce"
    return "two_phase" if number_of_owners(ranks.workers) > 1 else "all_gather"


def traffic(compressor: LossyCompressor, gradients: Layouts, ranks: Ranks, topology: str) -> int:
    """Bytes that a step sends between workers, for the rank that sends the most."""
    if topology in PARTITIONED:
        return _partitioned_traffic(compressor, gradients, ranks, dense_pull=topology == "server")
    total = 0
    for how, length in messages(compressor, gradients):
        if how == "gather":
            total += ranks.gather_traffic(length)
        elif how == "mean":
            total += ranks.add_traffic(length, gradients.device)
        else:
            total += ranks.maximum_traffic(length)
    return total


def _partitioned_traffic(compressor: LossyCompressor, gradients: Layouts, ranks: Ranks, *, dense_pull: bool) -> int:
    push, pull, values = [], [], compressor.dense_values
    partitions = gradients.layout.slices(ranks.workers)
    for partition, dense in zip(partitions, split_dense(gradients.dense_layout.n, ranks.workers), strict=True):
        n, there, back = partition.layout.n, 0, 0
        if n:
            there, back = compressor.partition_bytes(partition.layout, dense_pull)
        push.append(Frame(dense, values, there, _flags(gradients)).length)
        pull.append(Frame(dense, "fp32", back, _flags(gradients)).length)
    of_layout = compressor.messages(gradients.layout)
    before = sum(ranks.maximum_traffic(length) for how, length in of_layout if how == "maximum")
    return before + ranks.scatter_traffic(push, push.index(min(push))) + ranks.gather_traffic(max(pull))


def _flags(gradients: Layouts) -> int:
    return 1 + CALLER_FLAGS + len(gradients.names)


# Decisions


@dataclass(frozen=True)
class Decision:
    """What a step does.

    Args:
        sparsity: the schedule's value: 0 in a dense phase, None for a method without a sparsity.
        compressor: the compressor at this sparsity; None for a dense step.
        topology: how the payloads travel; without a compressor, "dense" or the fallback of topology="auto".
        is_plain: True for a plain dense average with no residual to send, which DDP can overlap with backward.
        wire: the format of a plain dense average, as in `Compressor.wire`.
    """

    sparsity: float | None = 0.0
    compressor: LossyCompressor | None = None
    topology: str = DENSE
    is_plain: bool = True
    wire: str = "fp32"

    @property
    def density(self) -> float:
        """Fraction of all elements that the schedule asks to send; 1 for a method without a sparsity."""
        return 1 - (self.sparsity or 0.0)


class Choice:
    """Chooses between dense and compressed steps: by bytes, and for topology="auto" also by a trial.

    Args:
        group: all ranks, which share the times of a trial.
        gradients: the layout at the start of the run.
    """

    def __init__(
        self,
        compressor: LossyCompressor,
        ranks: Ranks,
        topology: Topology,
        group: dist.ProcessGroup | None,
        gradients: Gradients,
    ) -> None:
        fallback = topology.fallback
        self._compressor, self._ranks = compressor, ranks
        self._wire = Decision.wire if fallback == "none" else fallback
        self.topologies: Sequence[str] = [topology.name]
        """The topologies to choose from."""
        self.autotune: Autotune | None = None
        """The trials, with topology="auto"."""
        if topology.name == "auto":
            partitioned = ranks.workers > 2 and compressor.not_partitioned_because is None
            self.topologies = CANDIDATES if partitioned else CANDIDATES[:1]
            if ranks.workers > 1 and gradients.compressed:
                uncompressed = DENSE if fallback == "none" else fallback
                self.autotune = Autotune(group, gradients.device, self.topologies, uncompressed=uncompressed)

    def decide(self, sparsity: float | None, gradients: Gradients, dense: Decision) -> Decision:
        """The decision for a step at this scheduled sparsity: `dense` unless compression sends fewer bytes."""
        compressor = self._compressor.with_sparsity(sparsity)
        asked = compressor.final_sparsity  # None without one
        budget = self._ranks.dense_traffic(gradients.largest.nbytes)
        sent = {name: traffic(compressor, gradients.largest, self._ranks, name) for name in self.topologies}
        affordable = [name for name in self.topologies if sent[name] < budget]
        topology = affordable[0] if affordable else DENSE
        if self.autotune:
            topology = self.autotune.choose(1 - (asked or 0.0), affordable)
        if topology not in self.topologies:
            return replace(dense, sparsity=asked, topology=topology, wire=self._wire)
        return Decision(asked, compressor, topology, is_plain=False)

    def describe(self, gradients: Gradients) -> str:
        """What is compressed, and the bytes that a step sends at the final sparsity."""
        sparsity, between = self._compressor.final_sparsity, self._ranks.between
        final = self._compressor.with_sparsity(sparsity)
        sent = {name: traffic(final, gradients.largest, self._ranks, name) for name in self.topologies}
        listed = " or ".join(f"{length:,} bytes sent{between} a step by {name}" for name, length in sent.items())
        at_sparsity = "" if sparsity is None else f"at sparsity {sparsity:g} "
        return (
            f"{len(gradients.compressed)} tensors ({gradients.layout.n:,} elements) compressed, {len(gradients.dense)} "
            f"({gradients.dense_layout.n:,}) dense in the same message; {at_sparsity}{listed}"
        )
