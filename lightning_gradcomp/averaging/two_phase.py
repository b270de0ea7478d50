"""Topologies with partitions: each worker averages one partition of the gradient, and sends the mean to all.

"two_phase": payloads of a partition go to the worker that owns it. The owner decodes them, adds them in worker order,
divides, compresses the mean again, and sends it to everyone. All workers decode the same bytes, so replicas are
bit-identical. A worker sends about twice its payload whatever the number of workers; in an all-gather, N - 1 times.

The error of the second compression stays in the owner's residual and is added to its next mean (server-side error
feedback: DoubleSqueeze, Tang et al. 2019, Algorithm 1). Sparse payloads are selected a second time, which keeps the
average as sparse as one worker's. Entries that this selection drops are not applied. They stay in the residuals of the
workers that sent them, and momentum factor masking skips them, as in Ok-Topk (Li and Hoefler 2022). DGC trains worse if
the owner keeps them while the workers' momentum is stopped. Without error feedback, owners have no residual either.

Nothing is lost: applied so far + mean of the workers' states + the owners' residuals = mean of all gradients so far.

"server" is MXNet's kvstore with its servers on the workers. The push is compressed; the pull is dense, in the format
`dense_values`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from lightning_gradcomp.averaging.exchange import Exchange, Frame, mean_of_rows
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.compressors.decoded import Decoded, Sparse, concatenate, mean_of
from lightning_gradcomp.compressors.layout import Layout, Slice
from lightning_gradcomp.compressors.payloads import Payloads, Uncompressed, pack_slice, slice_bytes, unpack_slice
from lightning_gradcomp.errors import refusal


def split_dense(n: int, workers: int) -> list[int]:
    """How many of the n uncompressed elements each worker averages."""
    whole, more = divmod(n, workers)
    return [whole + (worker < more) for worker in range(workers)]


class PartitionResidual:
    """The residual that this worker keeps as the owner of a partition.

    Args:
        accumulates: False for a compressor without error feedback; the residual then stays 0.
    """

    def __init__(self, layout: Layout, ranks: Ranks, device: torch.device, *, accumulates: bool) -> None:
        self.layout, self._ranks, self.device, self._accumulates = layout, ranks, device, accumulates
        self.slices = layout.slices(ranks.workers)
        """The partition of each worker."""
        self.own = self.slices[ranks.worker]
        self.residual = torch.zeros(self.own.layout.n, dtype=torch.float32, device=device)
        self._next: torch.Tensor | None = None
        self.used = False
        """True if owners may hold a residual; the same on all ranks."""

    def add_to(self, mean: torch.Tensor) -> None:
        mean.add_(self.residual)

    def subtract(self, mean: torch.Tensor, sent: Decoded) -> None:
        """Compute the residual that `commit` makes current: `mean` minus `sent`.

        Entries that a sparse payload drops keep their residual; the rest of their mean stays with the workers.
        """
        if not self._accumulates:
            return
        if isinstance(sent, Sparse):
            self._next = self.residual.clone()
            self._next[sent.indices] = mean[sent.indices] - sent.values
        else:
            self._next = mean.clone()
            sent.subtract_from(self._next)

    def commit(self, stepped: Set[str]) -> bool:
        """Make the new residual current for the parameters that the optimizer stepped. True if the step used it.

        A compressor without error feedback does not.
        """
        if self._next is None:
            return False
        self.own.layout.copy_except(stepped, self.residual, self._next)
        self.residual, self._next, self.used = self._next, None, True
        return True

    def clear(self, names: Set[str]) -> None:
        """Clear the residual of these parameters, after it was sent."""
        self.own.layout.zero(names, self.residual)
        self.used = self.used and bool(set(self.layout.names) - names)

    def whole(self) -> torch.Tensor:
        """The residual in a buffer for all parameters: fp32 [n], 0 in other partitions."""
        flat = self.residual.new_zeros(self.layout.n)
        self.own.of(flat).copy_(self.residual)
        return flat

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameter name -> tensor, 0 in other partitions' rows. Skips parameters without a row in this partition."""
        parts = self.layout.split(self.whole())
        return {name: parts[name] for name in self.own.layout.names}

    def load_state_dict(self, parts: Mapping[str, torch.Tensor]) -> None:
        """Replace the residual with this partition's rows of a `state_dict`."""
        self.residual = self.own.of(self.layout.join(parts, self.device)).clone()
        self.used = True


class TwoPhaseExchange(Exchange):
    """A step's `Collectives` with partitions. The uncompressed gradients are divided among the workers too.

    `residual` is this worker's as an owner; `dense_pull` is True for topology="server".
    """

    def __init__(self, residual: PartitionResidual, dense_pull: bool, *exchange: Any) -> None:
        super().__init__(*exchange)
        self._residual, self.dense_pull = residual, dense_pull
        self.slices: Sequence[Slice] = residual.slices
        self._dense_sizes = split_dense(self.extras.dense.numel(), self.workers)
        self._scattered, self._partition_mean = False, self.extras.dense[:0]

    def _frames(self, values: str, lengths: Sequence[int], carry: bool) -> list[Frame]:
        """One frame per partition; with `carry`, they include the extras."""
        sizes, flags = (self._dense_sizes, self.extras.count) if carry else ([0] * self.workers, 0)
        return [Frame(dense, values, length, flags) for dense, length in zip(sizes, lengths, strict=True)]

    def scatter(self, payloads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send payload j (uint8) to worker j. Returns what all workers sent to this one, in worker order."""
        extras, carry, self._scattered = self.extras, not self._scattered, True
        self.now("compress")
        frames = self._frames(extras.values, [payload.numel() for payload in payloads], carry)
        flags = extras.packed() if carry else payloads[0][:0]
        parts = extras.dense.split(self._dense_sizes) if carry else [extras.dense[:0]] * self.workers
        dense = [frame.pack_dense(part) for frame, part in zip(frames, parts, strict=True)]
        messages = [frame.pack(d, p, flags) for frame, d, p in zip(frames, dense, payloads, strict=True)]
        self.now("exchange")
        rows = self.ranks.scatter(messages)
        lengths, own = [frame.length for frame in frames], frames[self.worker]
        self._record(self.ranks.scatter_traffic(lengths, self.worker), self.ranks.gather_traffic(own.length))
        if carry:
            self.now("decompress")
            decoded = [frame.read_dense(part) for frame, part in zip(frames, dense, strict=True)]
            extras.sent = torch.cat(decoded)
            self._partition_mean = mean_of_rows([own.read_dense(row) for row in rows])
            extras.combine([own.read_flags(row) for row in rows])
        return [own.read_payload(row) for row in rows]

    def gather_partitions(self, payload: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """The payloads of all partitions, from their owners; `lengths` are their bytes. Call it after `scatter`."""
        extras, carry = self.extras, not self.extras.carried
        extras.carried = True
        frames = self._frames("fp32", lengths, carry)
        own, longest = frames[self.worker], max(frame.length for frame in frames)
        self.now("compress")
        flags, dense = extras.combined, self._partition_mean
        assert flags is not None
        flags, dense = (flags, dense) if carry else (flags[:0], dense[:0])
        message = own.pack(own.pack_dense(dense), payload, flags)
        message = torch.nn.functional.pad(message, (0, longest - own.length))
        self.now("exchange")
        rows = self.ranks.gather(message)
        self._record(self.ranks.gather_traffic(longest))
        if carry:
            self.now("decompress")
            extras.mean = torch.cat([frame.read_dense(row) for frame, row in zip(frames, rows, strict=True)])
            extras.combine([frame.read_flags(row) for frame, row in zip(frames, rows, strict=True)])
        return [frame.read_payload(row) for frame, row in zip(frames, rows, strict=True)]

    def mean_of_payloads(
        self, codec: Payloads, flat: torch.Tensor, layout: Layout, *, over_senders: bool = False
    ) -> tuple[Decoded, Decoded]:
        """Encode each partition for its owner, average this worker's partition, and encode and gather the means."""
        if over_senders:
            allowed = "False: payloads of a partition's mean do not say who sent an element"
            raise refusal("over_senders with a topology that has partitions", True, allowed)
        partitions, own = self.slices, self._residual.own.layout
        pull = Uncompressed(self.extras.values) if self.dense_pull else codec.for_means
        self.now("compress")
        pushed = [pack_slice(codec, partition.of(flat), partition.layout) for partition in partitions]
        rows = self.scatter([payload for payload, _ in pushed])
        self.now("decompress")
        mean = flat.new_zeros(own.n)
        for row in rows:
            unpack_slice(codec, row, own).add_to(mean)
        mean.div_(len(rows))
        self._residual.add_to(mean)
        self.now("compress")
        payload, sent = pack_slice(pull, mean, own)
        self._residual.subtract(mean, sent)
        lengths = [slice_bytes(pull, partition.layout) for partition in partitions]
        payloads = self.gather_partitions(payload, lengths)
        self.now("decompress")
        means = [unpack_slice(pull, row, partition.layout) for partition, row in zip(partitions, payloads, strict=True)]
        starts = [partition.start for partition in partitions]
        applied, own_sent = concatenate(means, starts), concatenate([decoded for _, decoded in pushed], starts)
        if isinstance(applied, Sparse) and isinstance(own_sent, Sparse):
            own_sent = own_sent.only(torch.isin(own_sent.indices, applied.indices, assume_unique=True))
        return mean_of([applied], 1, layout.n, self.buffer), own_sent
