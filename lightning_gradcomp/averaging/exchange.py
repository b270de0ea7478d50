"""One step's communication: collectives that carry what every rank must know of every other along with the payload."""

from __future__ import annotations

import torch

from lightning_gradcomp.averaging.message import Frame
from lightning_gradcomp.averaging.meter import Stats
from lightning_gradcomp.averaging.ranks import Ranks, add
from lightning_gradcomp.compressors.incoming import all_finite
from lightning_gradcomp.compressors.sent import Mean


class Exchange:
    """One step's communication.

    Once the payload has travelled, `dense_mean` is that of all ranks, and `agreed` tells what they know of each other;
    `dense_sent` is what the others have read of this rank's uncompressed gradients.

    Args:
        ranks: who exchanges.
        dense: uncompressed gradients, fp32 [d].
        finite: whether this rank's gradient is, 0-d bool.
        present: per parameter, whether this rank has something to add to its average; and a flag of the caller's.
        stats: where bytes and seconds are booked.
        mean: a buffer for the average of what is compressed, fp32 [n], kept from step to step.
        dense_values: how the uncompressed gradients are written in a gather.
    """

    def __init__(
        self,
        ranks: Ranks,
        dense: torch.Tensor,
        finite: torch.Tensor,
        present: list[bool],
        stats: Stats,
        mean: torch.Tensor,
        dense_values: str,
    ) -> None:
        self._values = dense_values
        self.buffer = mean
        """For the average, fp32 [n], with anything in it. A new one at each step would take more time."""
        self.ranks, self.stats, self._dense = ranks, stats, dense
        self._finite, self._present = finite.view(1), _flags(present, dense.device)
        self.dense_mean = self.dense_sent = dense
        self._carried = False

    @property
    def flags(self) -> torch.Tensor:
        """Whether this worker's gradient is finite, and what it has: bool."""
        return torch.cat([self._finite, self._present])

    def gather(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """Every worker's payload (uint8 [p], one length) in their order; the rest of the message comes with it."""
        with self.stats.phase("compress"):
            flags = self.flags
            frame = Frame(self._dense.numel(), self._values, payload.numel(), flags.numel())
            dense = frame.pack_dense(self._dense)
            self.dense_sent = frame.read_dense(dense)
            message = frame.pack(dense, payload, flags)
        with self.stats.phase("exchange"):
            messages = self.ranks.gather(message)
        self._book(self.ranks.gather_traffic(message.numel()))
        with self.stats.phase("decompress"):
            self.dense_mean = mean_of_rows([frame.read_dense(row) for row in messages])
            self._hear([frame.read_flags(row) for row in messages])
        return [frame.read_payload(row) for row in messages]

    def _hear(self, everyones: list[torch.Tensor]) -> None:
        """What the ranks' flags come to: finite if all are, present if any is."""
        flags = torch.stack(everyones)
        self._finite, self._present = flags[:, :1].all(0), flags[:, 1:].any(0)

    def mean(self, flat: torch.Tensor) -> torch.Tensor:
        """The mean of `flat` (fp32 [n]) over the ranks; the rest of the message travels with the first call."""
        with self.stats.phase("exchange"):
            # not finite: 1, so that it adds up to something; a sum of "finite" would have to be compared with N
            rest = [] if self._carried else [self._dense, torch.cat([~self._finite, self._present]).float()]
            parts = [flat, *rest]
            total = self.ranks.add(torch.cat(parts).div_(self.ranks.workers))
            mean, *means = total.split([part.numel() for part in parts])
            if rest:
                self.dense_mean, flags = means
                self._finite, self._present, self._carried = flags[:1] == 0, flags[1:] > 0, True
            self._book(self.ranks.add_traffic(total.nbytes, total.device))
            return mean

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of each of `values` (fp32 [m]) over the ranks. Carries nothing else."""
        with self.stats.phase("exchange"):
            self._book(self.ranks.maximum_traffic(values.nbytes))
            return self.ranks.maximum(values)

    def agreed(self, mean: Mean) -> tuple[bool, list[bool]]:
        """What all ranks know, now that they have the same mean.

        Returns:
            Whether every rank's gradient and the mean are finite; per parameter, and for the flag, whether any rank
            has something.
        """
        good, *anywhere = read(torch.cat([self._finite & all_finite(mean.values), self._present]))
        return good, anywhere

    def _book(self, sent: int, received: int | None = None) -> None:
        self.stats.bytes_sent += sent
        self.stats.bytes_received += sent if received is None else received


def mean_of_rows(rows: list[torch.Tensor]) -> torch.Tensor:
    """The mean of what ranks sent (fp32 [d] each), added in rank order."""
    mean = torch.zeros_like(rows[0])
    for row in rows:
        mean += row
    return mean.div_(len(rows))


def read(flags: torch.Tensor) -> list[bool]:
    """The `flags` as Python's: the one place in a compressed step where the host waits for a GPU."""
    return flags.tolist()


def _flags(marks: list[bool], device: torch.device) -> torch.Tensor:
    """`marks` on the device, bool. To wait for the copy would be to wait for all that a GPU was asked before."""
    return torch.tensor(marks, dtype=torch.bool).to(device, non_blocking=True)


def all_reduce_mean(
    ranks: Ranks,
    tensors: list[torch.Tensor],
    present: list[bool],
    wire: torch.dtype = torch.float32,
    saturate: bool = True,
) -> tuple[list[torch.Tensor], list[bool]]:
    """The means of flat `tensors` over the ranks, in one all-reduce that also tells what is `present` on any rank."""
    flags = _flags(present, tensors[0].device).float()
    *means, anywhere = all_reduce(ranks, [*tensors, flags], wire, saturate)
    return means, read(anywhere > 0)


def all_reduce(
    ranks: Ranks, parts: list[torch.Tensor], wire: torch.dtype = torch.float32, saturate: bool = True
) -> list[torch.Tensor]:
    """The means of the flat `parts` over the ranks, fp32, in one all-reduce."""
    buffer = torch.cat(parts)
    if ranks.world > 1:
        buffer = share(buffer, ranks.world, wire, saturate)
        add(ranks.group, buffer)
    return list(buffer.float().split([part.numel() for part in parts]))


def share(values: torch.Tensor, world: int, wire: torch.dtype, saturate: bool) -> torch.Tensor:
    """What a rank adds to the mean of `values` over `world` ranks: a world-th of them, as `wire`.

    With `saturate`, finite elements that are too large for a 16-bit wire become the largest that `world` ranks can add;
    infinities and NaN stay what they are. Under a loss scale they must not: the scaler has to see the overflow.
    """
    part = values / world
    if saturate and wire != torch.float32:
        largest = torch.tensor(torch.finfo(wire).max / world).to(wire)
        if float(largest) * world > torch.finfo(wire).max:  # rounded up
            largest = (largest.view(torch.int16) - 1).view(wire)
        part = torch.where(part.isfinite(), part.clamp(-float(largest), float(largest)), part)
    return part.to(wire)
