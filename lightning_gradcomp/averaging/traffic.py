"""Bytes that a step sends, computed from the compressor and the layout."""

from __future__ import annotations

from lightning_gradcomp.averaging.exchange import CALLER_FLAGS
from lightning_gradcomp.averaging.few_bits import few_bits_traffic
from lightning_gradcomp.averaging.framing import Frame
from lightning_gradcomp.averaging.gradients import Gradients, Layouts
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.topology import PARTITIONED
from lightning_gradcomp.averaging.two_phase import split_dense
from lightning_gradcomp.compressors.base import LossyCompressor
from lightning_gradcomp.compressors.few_bits import FORMATS
from lightning_gradcomp.compressors.kernels.formats import BITS


def messages(compressor: LossyCompressor, gradients: Gradients | Layouts) -> list[tuple[str, int]]:
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


def dense_step_traffic(gradients: Gradients | Layouts, ranks: Ranks, wire: str) -> int:
    """Bytes that a plain dense step sends between workers: those of a ring all-reduce, or of `mean_in_few_bits`."""
    if form := FORMATS.get(wire):
        return few_bits_traffic(form, gradients.layout.shapes, gradients.dense_layout.n, ranks)
    return ranks.dense_traffic(gradients.nbytes) * BITS[wire] // 32


def dense_topology(wire: str) -> str:
    """How plain dense steps travel."""
    return "two_phase" if wire in FORMATS else "all_reduce"


def traffic(compressor: LossyCompressor, gradients: Gradients | Layouts, ranks: Ranks, topology: str) -> int:
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


def _partitioned_traffic(
    compressor: LossyCompressor, gradients: Gradients | Layouts, ranks: Ranks, *, dense_pull: bool
) -> int:
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


def _flags(gradients: Gradients | Layouts) -> int:
    """Number of flags: one for a finite gradient, one per parameter, and the averager's."""
    return 1 + CALLER_FLAGS + len(gradients.layout.names) + len(gradients.dense_layout.names)
