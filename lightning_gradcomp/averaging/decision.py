"""The decision for each step: compressed or dense, and how its payloads travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from lightning_gradcomp.averaging.autotune import CANDIDATES, DENSE, Autotune
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.traffic import traffic
from lightning_gradcomp.compressors.base import LossyCompressor


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
        topology: str,
        group: dist.ProcessGroup | None,
        gradients: Gradients,
        fallback: str = "none",
    ) -> None:
        self._compressor, self._ranks = compressor, ranks
        self._wire = Decision.wire if fallback == "none" else fallback
        self.topologies: Sequence[str] = [topology]
        """The topologies to choose from."""
        self.autotune: Autotune | None = None
        """The trials, with topology="auto"."""
        if topology == "auto":
            partitioned = ranks.workers > 2 and compressor.not_partitioned_because is None
            self.topologies = CANDIDATES if partitioned else CANDIDATES[:1]
            if ranks.workers > 1 and gradients.compressed:
                uncompressed = DENSE if fallback == "none" else fallback
                self.autotune = Autotune(group, gradients.device, self.topologies, uncompressed=uncompressed)

    def choose(self, sparsity: float | None, gradients: Gradients, dense: Decision) -> Decision:
        """Return the decision for a step at this scheduled sparsity: `dense` unless compression sends fewer bytes."""
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
        """Describe what is compressed, and the bytes that a step sends at the final sparsity."""
        sparsity, between = self._compressor.final_sparsity, "" if self._ranks.per_worker == 1 else " between nodes"
        final = self._compressor.with_sparsity(sparsity)
        sent = {name: traffic(final, gradients.largest, self._ranks, name) for name in self.topologies}
        listed = " or ".join(f"{length:,} bytes sent{between} a step by {name}" for name, length in sent.items())
        at_sparsity = "" if sparsity is None else f"at sparsity {sparsity:g} "
        return (
            f"{len(gradients.compressed)} tensors ({gradients.layout.n:,} elements) compressed, {len(gradients.dense)} "
            f"({gradients.dense_layout.n:,}) dense in the same message; {at_sparsity}{listed}"
        )
