"""One step's communication: collectives that carry what all ranks must know of each other along with the payload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from lightning_gradcomp.averaging.framing import Frame
from lightning_gradcomp.averaging.ranks import SHORT, Ranks, add
from lightning_gradcomp.averaging.stats import Stats
from lightning_gradcomp.compressors.base import PayloadCodec
from lightning_gradcomp.compressors.decoded import Decoded, Dense, concatenate, mean_of
from lightning_gradcomp.compressors.layout import Layout, Slice

PARTS = 4
"""In so many parts at most does a payload travel, each of more than `SHORT` bytes on average."""
CALLER_FLAGS = 2
"""Flags that travel with a message besides those of the parameters."""


class Exchange:
    """One step's `Collectives`, by topology="all_gather": every worker's payload goes to every worker.

    The first `gather` or `mean` also carries the uncompressed gradients and the flags. After `finish`, `dense_mean` is
    the mean of all workers' uncompressed gradients, `agreed` says what they know of each other, and `dense_sent` is
    what the others have decoded of this worker's.

    Args:
        ranks: who exchanges.
        step: steps so far.
        dense: uncompressed gradients, fp32 [d].
        dense_values: how they are written in a gather.
        finite: whether this worker's gradient is, 0-d bool.
        present: per parameter, True if this worker has a gradient; then the caller's `CALLER_FLAGS` flags.
        stats: where bytes and seconds are recorded.
        buffer: returns a buffer for the average of what is compressed, fp32 [n], kept from step to step.
    """

    partitions: Sequence[Slice] | None = None
    dense_pull = False

    def __init__(
        self,
        ranks: Ranks,
        step: int,
        dense: torch.Tensor,
        dense_values: str,
        finite: torch.Tensor,
        present: list[bool],
        stats: Stats,
        buffer: Callable[[], torch.Tensor],
    ) -> None:
        self.ranks, self.workers, self.worker, self.step = ranks, ranks.workers, ranks.worker, step
        self.stats, self.buffer = stats, buffer
        self._dense, self._dense_values = dense, dense_values
        self._finite, self._present = finite.view(1), to_flags(present, dense.device)
        self.dense_mean = self.dense_sent = dense
        self._carried = False
        """Whether the uncompressed gradients and the flags have travelled."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Adds the time spent inside to phase `name`."""
        return self.stats.phase(name)

    def gather(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """The payloads (uint8 [p]) of all workers, in order."""
        return self.start_gather(payload)()

    def start_gather(self, payload: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Begins a `gather`. What it returns waits for the payloads; called in the same order on all workers."""
        frame = None
        if not self._carried:
            self._carried = True
            with self.phase("compress"):
                flags = self._flags
                frame = Frame(self._dense.numel(), self._dense_values, payload.numel(), flags.numel())
                dense = frame.pack_dense(self._dense)
                self.dense_sent = frame.read_dense(dense)
                payload = frame.pack(dense, payload, flags)
        with self.phase("exchange"):
            rows_of_all = self.ranks.start_gather(payload)
        self._record(self.ranks.gather_traffic(payload.numel()))

        def wait() -> list[torch.Tensor]:
            with self.phase("exchange"):
                rows = rows_of_all()
            if frame is None:
                return list(rows)
            with self.phase("decompress"):
                self.dense_mean = mean_of_rows([frame.read_dense(row) for row in rows])
                self._combine([frame.read_flags(row) for row in rows])
            return [frame.read_payload(row) for row in rows]

        return wait

    @property
    def _flags(self) -> torch.Tensor:
        """Whether this worker's gradient is finite, and which parameters have one: bool."""
        return torch.cat([self._finite, self._present])

    def _combine(self, rows: list[torch.Tensor]) -> None:
        """Finite if all workers' gradients are, present if any worker's is."""
        flags = torch.stack(rows)
        self._finite, self._present = flags[:, :1].all(0), flags[:, 1:].any(0)

    def mean(self, flat: torch.Tensor) -> torch.Tensor:
        """The mean of `flat` (fp32 [m]) over the workers."""
        with self.phase("exchange"):
            # not finite: 1, so that the sum says something; a sum of "finite" would have to be compared with N
            rest = [] if self._carried else [self._dense, torch.cat([~self._finite, self._present]).float()]
            parts = [flat, *rest]
            total = self.ranks.add(torch.cat(parts).div_(self.ranks.workers))
            mean, *means = total.split([part.numel() for part in parts])
            if rest:
                self.dense_mean, flags = means
                self._finite, self._present, self._carried = flags[:1] == 0, flags[1:] > 0, True
            self._record(self.ranks.add_traffic(total.nbytes, total.device))
            return mean

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of each of `values` (fp32 [m]) over the workers. Carries nothing else."""
        with self.phase("exchange"):
            self._record(self.ranks.maximum_traffic(values.nbytes))
            return self.ranks.maximum(values)

    def scatter(self, payloads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """For topologies with partitions."""
        raise NotImplementedError("scatter: topology='all_gather' has no partitions")

    def gather_partitions(self, payload: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """For topologies with partitions."""
        raise NotImplementedError("gather_partitions: topology='all_gather' has no partitions")

    def mean_of_payloads(
        self, codec: PayloadCodec, flat: torch.Tensor, layout: Layout, *, over_senders: bool = False
    ) -> tuple[Decoded, Decoded]:
        """Encodes `flat`, gathers payloads, decodes and adds them in the workers' order: (mean, what this one sent).

        A long payload of tensors that are encoded one by one travels in parts: each while the next one is encoded, and
        the one before it decoded.
        """
        parts = [Slice(0, layout)]
        if codec.tensor_by_tensor:
            parts = layout.parts(min(PARTS, codec.payload_bytes(layout) // SHORT))
        begun: list[tuple[Decoded, Callable[[], list[torch.Tensor]]]] = []
        for part in parts:
            with self.phase("compress"):
                payload, sent = codec.encode(part.of(flat), part.layout)
            begun.append((sent, self.start_gather(payload)))
        means: list[Decoded] = []
        for part, (sent, payloads) in zip(parts, begun, strict=True):
            rows = enumerate(payloads())
            with self.phase("decompress"):
                decoded = (sent if worker == self.worker else codec.decode(row, part.layout) for worker, row in rows)
                buffer = partial(_part_of_buffer, part, self.buffer)
                means.append(mean_of(decoded, self.workers, part.layout.n, buffer, over_senders=over_senders))
        if len(parts) == 1:
            return means[0], begun[0][0]
        return Dense(self.buffer()), concatenate([sent for sent, _ in begun], [part.start for part in parts])

    def finish(self) -> None:
        """Sends the uncompressed gradients and the flags, if no message has carried them."""
        if not self._carried:
            self.gather(self._dense.new_empty(0, dtype=torch.uint8))

    def agreed(self, mean: Decoded) -> tuple[bool, list[bool]]:
        """What all ranks know, now that they have the same mean.

        Returns:
            True if every worker's gradient and the mean are finite; per parameter, and for each of the caller's flags,
            True if any worker has one.
        """
        bad = ~(self._finite & mean.finite())
        present, flags = self._present[:-CALLER_FLAGS], self._present[-CALLER_FLAGS:]
        bad, flags = self.ranks.any_shard(torch.cat([bad, flags])).split([1, CALLER_FLAGS])
        good, *anywhere = read_flags(torch.cat([~bad, present, flags]))
        return good, anywhere

    def _record(self, sent: int, received: int | None = None) -> None:
        self.stats.bytes_sent += sent
        self.stats.bytes_received += sent if received is None else received


def _part_of_buffer(part: Slice, buffer: Callable[[], torch.Tensor]) -> torch.Tensor:
    return part.of(buffer())


def mean_of_rows(rows: list[torch.Tensor]) -> torch.Tensor:
    """The mean of fp32 [d] each, added in order."""
    mean = torch.zeros_like(rows[0])
    for row in rows:
        mean += row
    return mean.div_(len(rows))


def read_flags(flags: torch.Tensor) -> list[bool]:
    """The `flags` as Python's: the one place in a compressed step where the host waits for a GPU."""
    return flags.tolist()


def to_flags(flags: list[bool], device: torch.device) -> torch.Tensor:
    """`flags` on the device, bool. Waiting for the copy would be waiting for everything queued on a GPU."""
    return torch.tensor(flags, dtype=torch.bool).to(device, non_blocking=True)


def all_reduce_mean(
    ranks: Ranks,
    tensors: list[torch.Tensor],
    present: list[bool],
    wire_dtype: torch.dtype = torch.float32,
    saturate: bool = True,
) -> tuple[list[torch.Tensor], list[bool]]:
    """The means of flat `tensors` over the ranks, fp32, in one all-reduce that also says what is `present` anywhere."""
    flags = to_flags(present, tensors[0].device).float()
    parts = [*tensors, flags]
    buffer = torch.cat(parts)
    if ranks.world > 1:
        buffer = to_wire(buffer, ranks.world, wire_dtype, saturate)
        add(ranks.group, buffer)
    *means, anywhere = buffer.float().split([part.numel() for part in parts])
    return means, read_flags(anywhere > 0)


def to_wire(values: torch.Tensor, world: int, wire_dtype: torch.dtype, saturate: bool) -> torch.Tensor:
    """What a rank adds to the mean of `values` over `world` ranks: values / world, as `wire_dtype`.

    With `saturate`, finite elements that are too large for 16 bits become the largest that `world` ranks can add;
    infinities and NaN stay what they are. Under a loss scale they must not: the scaler has to see the overflow.
    """
    part = values / world
    if saturate and wire_dtype != torch.float32:
        largest = torch.tensor(torch.finfo(wire_dtype).max / world, dtype=torch.float32).to(wire_dtype)
        if float(largest) * world > torch.finfo(wire_dtype).max:  # rounded up
            largest = (largest.view(torch.int16) - 1).view(wire_dtype)
        part = torch.where(part.isfinite(), part.clamp(-float(largest), float(largest)), part)
    return part.to(wire_dtype)
