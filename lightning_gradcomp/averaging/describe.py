"""One line for the log: what is compressed, what a step sends, how that travels, and why."""

from __future__ import annotations

from lightning_gradcomp.averaging.auto import Auto
from lightning_gradcomp.averaging.compression import Compression
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.trial import Trial
from lightning_gradcomp.compressors.base import Compressor


def describe(
    compressor: Compressor,
    compression: Compression | None,
    topology: str,
    ranks: Ranks,
    dense: int,
    auto: Auto | None,
    trial: Trial | None,
) -> str:
    """The line for one run.

    Args:
        compression: None for a baseline.
        topology: how messages travel once the warm-up is over.
        dense: bytes of a dense step.
        auto, trial: where topology is "auto".
    """
    name = type(compressor).__name__
    if ranks.group is None or ranks.world == 1:
        return f"{name}: world size 1, so nothing is exchanged and nothing compressed; training is as without it."
    nodes = f" on {ranks.workers} nodes" if ranks.per_worker > 1 else ""
    where = f"N={ranks.world}{nodes}, {ranks.group.name()}"
    if compression is None:
        return f"{name}: {dense * compressor.wire.itemsize // 4:,} bytes sent a step ({where}, ring all-reduce)."
    modelled = f" {auto.describe(1 - compression.compressor.final_sparsity)}." if auto else ""
    tried = f" {trial.outcome or 'The first steps will show whether compressing is quicker'}." if trial else ""
    return f"{name}: {_sent(compression, topology)}, against {dense:,} dense ({where}).{modelled}{tried}"


def _sent(compression: Compression, topology: str) -> str:
    gradients, sparsity = compression.gradients, compression.compressor.final_sparsity
    if not gradients.compressed:
        return "no tensor is large enough to be compressed, all travel dense"
    at_sparsity = f"at sparsity {sparsity:g} " if hasattr(compression.compressor, "sparsity") else ""
    between = "" if compression.ranks.per_worker == 1 else " between nodes"
    return (
        f"{len(gradients.compressed)} tensors ({gradients.layout.n:,} elements) compressed, "
        f"{len(gradients.dense)} ({gradients.dense_layout.n:,}) dense in the same message; "
        f"{at_sparsity}{compression.traffic(1 - sparsity, topology):,} bytes sent{between} a step by {topology}"
    )
