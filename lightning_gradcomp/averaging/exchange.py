"""A step's communication: collectives that carry the payload, the uncompressed gradients and the flags.

A message:

    | dense gradients [d], padded to 4 bytes | payload, uint8 [p] | flags, 1 bit each | padded to 4 bytes |

The first flag is set if this rank's gradient is not finite. Then each parameter has one, set if this rank has its
gradient. The last ones are the averager's `Flags`. Layout and sparsity determine all lengths, so they are the same on
all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_gradcomp.averaging.ranks import SHORT, Ranks, add
from lightning_gradcomp.averaging.stats import Stats
from lightning_gradcomp.compressors.decoded import Decoded, Dense, concatenate, mean_of
from lightning_gradcomp.compressors.kernels.bits import padded, zeros
from lightning_gradcomp.compressors.kernels.formats import DTYPES, pack_values, unpack_values, value_bytes
from lightning_gradcomp.compressors.layout import Layout, Slice
from lightning_gradcomp.compressors.payloads import Payloads

PARTS = 4
"""Maximum number of parts of a payload, each longer than `SHORT` bytes on average."""


class Flags(NamedTuple):
    """An averager's flags, which travel with its gradients. After an average, a flag is True if any rank set it.

    Args:
        stop: set by the caller, for example after a SIGTERM.
        changed: the trainable parameters are not those that the gradients are laid out for.
        odd: the lowest bit of the rank's step is 1.
        even: it is 0. Both are set if some ranks' bits are 1 and others' are 0.
        second_odd: the same for the second bit.
        second_even: the same for the second bit.
    """

    stop: bool = False
    changed: bool = False
    odd: bool = False
    even: bool = False
    second_odd: bool = False
    second_even: bool = False

    @classmethod
    def at(cls, step: int, *, stop: bool, changed: bool) -> Flags:
        odd, second_odd = bool(step & 1), bool(step & 2)
        return cls(stop, changed, odd, not odd, second_odd, not second_odd)

    @property
    def steps_differ(self) -> bool:
        """True if the ranks are at different steps. Differences of a multiple of 4 do not show."""
        return (self.odd and self.even) or (self.second_odd and self.second_even)

    @property
    def void(self) -> bool:
        """True if no rank applies the average."""
        return self.changed or self.steps_differ


CALLER_FLAGS = len(Flags._fields)
"""Number of flags in a message besides the one for finite gradients and the one per parameter."""


@dataclass(frozen=True)
class Frame:
    """Positions in a message: `dense` uncompressed elements in the format `values`, `payload` bytes, and `flags` flags.

    The payload starts, and the message ends, at a multiple of 4 bytes: fp32 stays aligned.
    """

    dense: int
    values: str
    payload: int
    flags: int

    @property
    def _payload_at(self) -> int:
        return padded(value_bytes(self.dense, self.values))

    @property
    def length(self) -> int:
        return self._payload_at + padded(self.payload + (self.flags + 7) // 8)

    def pack(self, dense: torch.Tensor, payload: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        """The message (uint8 [length]) made of `pack_dense`'s bytes, the payload and the packed flags."""
        padding = zeros(3, torch.uint8, payload.device)
        before = padding[: self._payload_at - dense.numel()]
        after = padding[: self.length - self._payload_at - self.payload - flags.numel()]
        return torch.cat([dense, before, payload, flags, after])

    def pack_dense(self, dense: torch.Tensor) -> torch.Tensor:
        """The uncompressed gradients (fp32 [dense]) as bytes."""
        return pack_values(dense, self.values)

    def read_dense(self, message: torch.Tensor) -> torch.Tensor:
        return unpack_values(message[: value_bytes(self.dense, self.values)], self.dense, self.values)

    def read_payload(self, message: torch.Tensor) -> torch.Tensor:
        return message[self._payload_at : self._payload_at + self.payload]

    def read_flags(self, message: torch.Tensor) -> torch.Tensor:
        start = self._payload_at + self.payload
        return message[start : start + (self.flags + 7) // 8]


class Extras:
    """The uncompressed gradients and the flags, which the step's first message carries.

    After the exchange, `mean` is the workers' mean of the uncompressed gradients (fp32 [d]), and `sent` is what the
    other workers decoded from this one.

    Args:
        dense: this worker's uncompressed gradients, fp32 [d].
        values: their wire format, as in `dense_values`.
        bad: True if this worker's gradient is not finite; 0-d bool.
        present: for each parameter, True if this worker has a gradient; then the `Flags`.
    """

    def __init__(self, dense: torch.Tensor, values: str, bad: torch.Tensor, present: list[bool]) -> None:
        self.dense, self.values = dense, values
        self.mean = self.sent = dense
        self.bad, self.present = bad.view(1), present
        self.carried = False
        self.combined: torch.Tensor | None = None
        """The flags of all workers: `packed`, or the sum of all workers' `numbers`."""

    @property
    def count(self) -> int:
        return 1 + len(self.present)

    def packed(self) -> torch.Tensor:
        """[bad, *present], eight to a byte, the first lowest: uint8 [ceil(count / 8)]."""
        packed = np.packbits([False, *self.present], bitorder="little")
        flags = torch.from_numpy(packed).to(self.bad.device, non_blocking=True)
        flags[:1].bitwise_or_(self.bad)
        return flags

    def numbers(self) -> list[torch.Tensor]:
        """[bad] and `present` as numbers that can be added, fp32."""
        return [self.bad.float(), to_flags(self.present, self.bad.device, torch.float32)]

    def combine(self, rows: list[torch.Tensor]) -> None:
        self.combined = reduce(torch.bitwise_or, rows)

    def read(self, finite: torch.Tensor) -> tuple[bool, list[bool]]:
        """Read the combined flags, and True if the mean is `finite` (0-d bool), from the device.

        Returns:
            True if every worker's gradient and the mean are finite; `present`, with True for each that any worker has.
        """
        assert self.combined is not None
        *flags, mean_is_finite = read_flags(torch.cat([self.combined, finite.view(1)]))
        if self.combined.dtype == torch.uint8:
            flags = np.unpackbits(np.array(flags, np.uint8), count=self.count, bitorder="little")
        bad, *found = [bool(flag) for flag in flags]
        return bool(mean_is_finite) and not bad, found


class Exchange:
    """A step's `Collectives` with topology="all_gather": every worker's payload goes to every worker.

    `buffer` returns that of `Collectives`.
    """

    def __init__(
        self, ranks: Ranks, step: int, extras: Extras, stats: Stats, buffer: Callable[[], torch.Tensor]
    ) -> None:
        self.ranks, self.workers, self.worker, self.step = ranks, ranks.workers, ranks.worker, step
        self.extras, self.stats, self.now, self.buffer = extras, stats, stats.now, buffer

    def mean_of_payloads(
        self, codec: Payloads, flat: torch.Tensor, layout: Layout, *, over_senders: bool = False
    ) -> tuple[Decoded, Decoded]:
        """If tensors are encoded one by one, a long payload is sent in parts.

        Each part travels while the next one is encoded and the previous one is decoded. A GPU encodes all tensors at
        once, which takes few launches.
        """
        parts = [Slice(0, layout)]
        if codec.tensor_by_tensor and not flat.is_cuda:
            parts = layout.parts(min(PARTS, codec.payload_bytes(layout) // SHORT))
        begun: list[tuple[Decoded, Callable[[], list[torch.Tensor]]]] = []
        for part in parts:
            self.now("compress")
            payload, sent = codec.pack(part.of(flat), part.layout)
            begun.append((sent, self.start_gather(payload)))
        means: list[Decoded] = []
        for part, (sent, payloads) in zip(parts, begun, strict=True):
            rows = enumerate(payloads())
            self.now("decompress")
            decoded = (sent if worker == self.worker else codec.unpack(row, part.layout) for worker, row in rows)
            buffer = partial(lambda part: part.of(self.buffer()), part)
            means.append(mean_of(decoded, self.workers, part.layout.n, buffer, over_senders=over_senders))
        if len(parts) == 1:
            return means[0], begun[0][0]
        return Dense(self.buffer()), concatenate([sent for sent, _ in begun], [part.start for part in parts])

    def gather(self, payload: torch.Tensor) -> list[torch.Tensor]:
        return self.start_gather(payload)()

    def start_gather(self, payload: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Start a `gather`. Returns a function that waits for the payloads. Call both in one order on all workers."""
        extras, frame = self.extras, None
        if not extras.carried:
            extras.carried = True
            self.now("compress")
            frame = Frame(extras.dense.numel(), extras.values, payload.numel(), extras.count)
            dense = frame.pack_dense(extras.dense)
            extras.sent = frame.read_dense(dense)
            payload = frame.pack(dense, payload, extras.packed())
        self.now("exchange")
        rows_of_all = self.ranks.start_gather(payload)
        self._record(self.ranks.gather_traffic(payload.numel()))

        def wait() -> list[torch.Tensor]:
            self.now("exchange")
            rows = rows_of_all()
            if frame is None:
                return list(rows)
            self.now("decompress")
            extras.mean = mean_of_rows([frame.read_dense(row) for row in rows])
            extras.combine([frame.read_flags(row) for row in rows])
            return [frame.read_payload(row) for row in rows]

        return wait

    def mean(self, flat: torch.Tensor) -> torch.Tensor:
        self.now("exchange")
        extras, rest = self.extras, []
        if not extras.carried:
            rest = [extras.dense, *extras.numbers()]
        parts = [flat, *rest]
        total = self.ranks.add(torch.cat(parts).div_(self.ranks.workers))
        mean = total[: flat.numel()]
        if rest:
            extras.mean, extras.combined = total[flat.numel() :].split([extras.dense.numel(), extras.count])
            extras.carried = True
        self._record(self.ranks.add_traffic(total.nbytes, total.device))
        return mean

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        self.now("exchange")
        self._record(self.ranks.maximum_traffic(values.nbytes))
        return self.ranks.maximum(values)

    def finish(self) -> None:
        """Send the extras in a message of their own if none has carried them."""
        if not self.extras.carried:
            self.gather(self.extras.dense.new_empty(0, dtype=torch.uint8))

    def _record(self, sent: int, received: int | None = None) -> None:
        self.stats.bytes_sent += sent
        self.stats.bytes_received += sent if received is None else received


def mean_of_rows(rows: list[torch.Tensor]) -> torch.Tensor:
    """The mean of fp32 [d] rows, added in order."""
    return reduce(torch.add, rows) / len(rows)


def read_flags(flags: torch.Tensor) -> list[Any]:
    """`flags` as a list. Only here does the host wait for a GPU in a compressed step."""
    return flags.tolist()


def to_flags(flags: list[bool], device: torch.device, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    """`flags` as a tensor. A blocking copy would wait for all work queued on a GPU."""
    return torch.tensor(flags, dtype=dtype).to(device, non_blocking=True)


def all_reduce_mean(
    ranks: Ranks,
    tensors: list[torch.Tensor],
    present: list[bool],
    wire: str = "fp32",
    saturate: bool = True,
) -> tuple[list[torch.Tensor], list[bool]]:
    """The fp32 means of flat `tensors` over the ranks, and True for each of `present` that any rank set.

    Uses one all-reduce.
    """
    flags = to_flags(present, tensors[0].device, torch.float32)
    parts = [*tensors, flags]
    buffer = torch.cat(parts)
    if ranks.world > 1:
        buffer = to_wire(buffer, ranks.world, wire, saturate)
        add(ranks.group, buffer)
    *means, anywhere = buffer.float().split([part.numel() for part in parts])
    return means, read_flags(anywhere > 0)


def to_wire(values: torch.Tensor, world: int, wire: str, saturate: bool) -> torch.Tensor:
    """A rank's share of the mean of `values` over `world` ranks: values / world, as "fp32", "bf16" or "fp16".

    With `saturate`, finite elements too large for 16 bits become the largest value that `world` ranks can add.
    Infinities and NaNs stay as they are. With a loss scale, do not saturate: the scaler has to see the overflow.
    """
    part, dtype = values / world, DTYPES[wire]
    if saturate and dtype != torch.float32:
        largest = torch.tensor(torch.finfo(dtype).max / world, dtype=torch.float32).to(dtype)
        if float(largest) * world > torch.finfo(dtype).max:  # rounded up
            largest = (largest.view(torch.int16) - 1).view(dtype)
        part = torch.where(part.isfinite(), part.clamp(-float(largest), float(largest)), part)
    return part.to(dtype)
