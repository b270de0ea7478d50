"""What a rank has sent, as the others will read it: all values of a flat buffer, some, or pieces decoded on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from lightning_gradcomp.lazy import torch


@dataclass(frozen=True)
class Sparse:
    """Some entries of a flat buffer: `indices` (int64, distinct, ascending) and their `values` (fp32), both [k]."""

    indices: torch.Tensor
    values: torch.Tensor

    def add_to(self, flat: torch.Tensor) -> None:
        """flat[indices] += values. Indices are distinct, so the result does not depend on any order."""
        flat.index_add_(0, self.indices, self.values)

    def take_from(self, flat: torch.Tensor) -> None:
        """flat[indices] -= values."""
        flat[self.indices] -= self.values

    def zero(self, flat: torch.Tensor) -> None:
        """flat[indices] = 0."""
        flat[self.indices] = 0


@dataclass(frozen=True)
class Everything:
    """A value for each element of a flat buffer, fp32 [n]."""

    values: torch.Tensor

    def add_to(self, flat: torch.Tensor) -> None:
        """flat += values."""
        flat.add_(self.values)

    def take_from(self, flat: torch.Tensor) -> None:
        """flat -= values."""
        flat.sub_(self.values)

    def zero(self, flat: torch.Tensor) -> None:
        """flat = 0."""
        flat.zero_()


@dataclass(frozen=True)
class Piecewise:
    """A value for each element of a flat buffer, decoded anew, a piece at a time, whenever it is asked for.

    Decoding is quick, and so is adding a piece that is still in the processor's cache; a second buffer as large as the
    first would cost more than both.

    Args:
        pieces: (start, stop) of each piece; together they cover the buffer.
        values: from the number of a piece to its values, fp32 [stop - start].
    """

    pieces: Sequence[tuple[int, int]]
    values: Callable[[int], torch.Tensor]

    def add_to(self, flat: torch.Tensor) -> None:
        """flat += values."""
        for number, (start, stop) in enumerate(self.pieces):
            flat[start:stop].add_(self.values(number))

    def take_from(self, flat: torch.Tensor) -> None:
        """flat -= values."""
        for number, (start, stop) in enumerate(self.pieces):
            flat[start:stop].sub_(self.values(number))

    def zero(self, flat: torch.Tensor) -> None:
        """flat = 0."""
        flat.zero_()


Sent = Sparse | Everything | Piecewise
"""What a rank has sent, as the others will read it."""

Mean = Sparse | Everything
"""The average over the ranks."""


NOTHING = Piecewise((), lambda number: torch.empty(0))
"""What is sent of no elements."""


def joined(parts: Sequence[Sent], starts: Sequence[int]) -> Sparse | Piecewise:
    """Stretches of a flat buffer, sparse all of them or none, each with the place where it begins, as one."""
    sparse = [(part, start) for part, start in zip(parts, starts, strict=True) if isinstance(part, Sparse)]
    if sparse:
        indices = torch.cat([part.indices + start for part, start in sparse])
        return Sparse(indices, torch.cat([part.values for part, _ in sparse]))
    pieces, calls = [], []
    for part, start in zip(parts, starts, strict=True):
        if isinstance(part, Everything):
            pieces.append((start, start + part.values.numel()))
            calls.append(part.values.clone)
            continue
        assert isinstance(part, Piecewise)
        for number, (a, b) in enumerate(part.pieces):
            pieces.append((a + start, b + start))
            calls.append(partial(part.values, number))
    return Piecewise(pieces, lambda number: calls[number]())


def read_all(
    payloads: Sequence[torch.Tensor], rank: int, sent: Sent, decode: Callable[[torch.Tensor], Sent]
) -> list[Sent]:
    """What the ranks' payloads say, in rank order; that of `rank` is known to be `sent`."""
    return [sent if number == rank else decode(row) for number, row in enumerate(payloads)]


MERGING = 80
"""To sort out an index that several ranks may have sent takes as long as to add so many elements."""


def mean_of(everyones: Sequence[Sent], buffer: torch.Tensor) -> Mean:
    """The mean of what ranks sent, added in rank order; in `buffer` (fp32 [n]), unless it is sparse."""
    sparse = [one for one in everyones if isinstance(one, Sparse)]
    few = sum(len(one.indices) for one in sparse) * MERGING < len(buffer)
    if len(sparse) == len(everyones) and few and not buffer.is_cuda:  # a GPU would be waited for: how many are left?
        indices, places = torch.cat([one.indices for one in sparse]).unique(return_inverse=True)
        values = torch.zeros(len(indices)).index_add_(0, places, torch.cat([one.values for one in sparse]))
        return Sparse(indices, values.div_(len(sparse)))
    piecewise = [one for one in everyones if isinstance(one, Piecewise)]
    if len(piecewise) == len(everyones):
        return Everything(mean_of_pieces(piecewise, buffer))
    mean = buffer.zero_()
    for one in everyones:
        one.add_to(mean)
    return Everything(mean.div_(len(everyones)))


def mean_of_pieces(everyones: Sequence[Piecewise], out: torch.Tensor) -> torch.Tensor:
    """The mean of what is cut alike, a piece at a time while it is in the cache, in `out` (fp32 [n])."""
    for number, (start, stop) in enumerate(everyones[0].pieces):
        total = everyones[0].values(number)
        for one in everyones[1:]:
            total.add_(one.values(number))
        torch.div(total, len(everyones), out=out[start:stop])
    return out
