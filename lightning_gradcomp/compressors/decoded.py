"""A payload after decoding: some entries of a flat buffer, all of them, or chunks that are decoded on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise

import torch

from lightning_gradcomp.compressors.layout import Layout


@dataclass(frozen=True)
class Sparse:
    """Some entries of a flat buffer: `indices` (int64, distinct, ascending) and their `values` (fp32), both [k]."""

    indices: torch.Tensor
    values: torch.Tensor

    def add_to(self, flat: torch.Tensor) -> None:
        """flat[indices] += values. Indices are distinct, so the result does not depend on any order."""
        flat.index_add_(0, self.indices, self.values)

    def subtract_from(self, flat: torch.Tensor) -> None:
        """flat[indices] -= values."""
        flat[self.indices] -= self.values

    def zero(self, flat: torch.Tensor) -> None:
        """flat[indices] = 0."""
        flat.index_fill_(0, self.indices, 0)

    def finite(self) -> torch.Tensor:
        """True if all values are finite: 0-d bool."""
        return all_finite(self.values)

    def only(self, keep: torch.Tensor) -> KeptSparse:
        """The entries that `keep` (bool [k]) marks. Their number stays unknown: a GPU's host would wait for it."""
        return KeptSparse(self.indices, torch.where(keep, self.values, 0), keep)


@dataclass(frozen=True)
class KeptSparse(Sparse):
    """Those entries that `keep` (bool [k]) marks; the values of the others are 0."""

    keep: torch.Tensor

    def zero(self, flat: torch.Tensor) -> None:
        """flat[indices] = 0 for the marked ones."""
        flat[self.indices] = torch.where(self.keep, 0, flat[self.indices])


@dataclass(frozen=True)
class Dense:
    """A value for each element of a flat buffer, fp32 [n]."""

    values: torch.Tensor

    def add_to(self, flat: torch.Tensor) -> None:
        """flat += values."""
        flat.add_(self.values)

    def subtract_from(self, flat: torch.Tensor) -> None:
        """flat -= values."""
        flat.sub_(self.values)

    def zero(self, flat: torch.Tensor) -> None:
        """flat = 0."""
        flat.zero_()

    def finite(self) -> torch.Tensor:
        """True if all values are finite: 0-d bool."""
        return all_finite(self.values)


@dataclass(frozen=True)
class Chunked:
    """A value for each element of a flat buffer, decoded again, one chunk at a time, whenever it is needed.

    Decoding is quick, and so is adding a chunk that is still in the processor's cache; a second buffer as large as the
    first would cost more than both.

    Args:
        chunks: (start, stop) of each chunk; together they cover the buffer.
        values: from the number of a chunk to its values, fp32 [stop - start].
        is_finite: for a mean, which is checked before it is applied: True if all values are finite, 0-d bool.
    """

    chunks: Sequence[tuple[int, int]]
    values: Callable[[int], torch.Tensor]
    is_finite: torch.Tensor | None = None

    def add_to(self, flat: torch.Tensor) -> None:
        """flat += values."""
        for number, (start, stop) in enumerate(self.chunks):
            flat[start:stop].add_(self.values(number))

    def subtract_from(self, flat: torch.Tensor) -> None:
        """flat -= values."""
        for number, (start, stop) in enumerate(self.chunks):
            flat[start:stop].sub_(self.values(number))

    def zero(self, flat: torch.Tensor) -> None:
        """flat = 0."""
        flat.zero_()

    def finite(self) -> torch.Tensor:
        """True if all values are finite: 0-d bool."""
        assert self.is_finite is not None
        return self.is_finite


Decoded = Sparse | Dense | Chunked

EMPTY = Chunked((), lambda number: torch.empty(0, dtype=torch.float32))
"""The decoded payload of no elements."""


def concatenate(parts: Sequence[Decoded], starts: Sequence[int]) -> Sparse | Chunked:
    """The decoded payloads of slices of a buffer, which begin at `starts`, as one. All are sparse, or none is."""
    sparse = [(part, start) for part, start in zip(parts, starts, strict=True) if isinstance(part, Sparse)]
    if sparse:
        indices = torch.cat([part.indices + start for part, start in sparse])
        return Sparse(indices, torch.cat([part.values for part, _ in sparse]))
    places: list[tuple[int, int]] = []
    calls: list[Callable[[], torch.Tensor]] = []
    for part, start in zip(parts, starts, strict=True):
        if isinstance(part, Dense):
            places.append((start, start + part.values.numel()))
            calls.append(partial(getattr, part, "values"))
            continue
        assert isinstance(part, Chunked)
        for number, (a, b) in enumerate(part.chunks):
            places.append((a + start, b + start))
            calls.append(partial(part.values, number))
    return Chunked(places, lambda number: calls[number]())


def by_tensor(mean: Decoded, layout: Layout) -> Iterator[tuple[torch.Tensor | None, torch.Tensor]]:
    """For each tensor of `layout`: positions in it (int64 [k]) and values there; or None, and a value for each element.

    Where the mean is `Chunked`, each chunk is a whole tensor or several, which are computed when they are asked for.
    """
    if isinstance(mean, Sparse):
        bounds = torch.tensor([0, *(stop for _, stop in layout.bounds)], device=mean.indices.device)
        cuts = pairwise(torch.searchsorted(mean.indices, bounds).tolist())
        for (start, _), (begin, end) in zip(layout.bounds, cuts, strict=True):
            yield mean.indices[begin:end] - start, mean.values[begin:end]
    elif isinstance(mean, Dense):
        for start, stop in layout.bounds:
            yield None, mean.values[start:stop]
    else:
        number, begin, values = -1, 0, torch.empty(0, dtype=torch.float32)
        for start, stop in layout.bounds:
            if stop > begin + len(values):
                number += 1
                begin, values = start, mean.values(number)
            yield None, values[start - begin : stop - begin]


def locate(places: torch.Tensor, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """A view of `tensor`, and the index there of its elements at flat positions `places` (int64 [k])."""
    if tensor.is_contiguous():
        return tensor.view(-1), (places,)
    return tensor, torch.unravel_index(places, tensor.shape)  # channels last, say


MERGE_COST = 30
"""Cost of merging one index, in units of one element of a dense mean."""


def mean_of(
    decoded: Iterable[Decoded],
    workers: int,
    n: int,
    buffer: Callable[[], torch.Tensor],
    *,
    over_senders: bool = False,
) -> Sparse | Dense:
    """The mean of all workers' payloads, added in their order, so with the same bits on every rank.

    Args:
        decoded: one for each worker, of one kind. Where sparse entries are many, an iterator may decode the next
            worker's after this one's were added.
        workers: how many.
        n: elements of the flat buffer.
        buffer: returns fp32 [n] with any content, for a mean that is not sparse.
        over_senders: divide each element's sum by the number of payloads, all sparse, that hold it.
    """
    rest = iter(decoded)
    first = next(rest)
    if isinstance(first, Sparse) and len(first.indices) * workers * MERGE_COST < n and not first.values.is_cuda:
        entries = [first, *(one for one in rest if isinstance(one, Sparse))]  # a GPU's host would wait for their count
        indices, places = torch.unique(torch.cat([one.indices for one in entries]), return_inverse=True)
        values = torch.zeros(len(indices), dtype=torch.float32).index_add_(
            0, places, torch.cat([one.values for one in entries])
        )
        return Sparse(indices, values.div_(torch.bincount(places) if over_senders else workers))
    mean = buffer()
    if isinstance(first, Chunked):  # all are cut alike: a chunk of all workers at a time, while it is in the cache
        chunked = [first, *(one for one in rest if isinstance(one, Chunked))]
        for number, (start, stop) in enumerate(first.chunks):
            total, part = first.values(number), mean[start:stop]  # `values` may return a view of a payload
            for one in chunked[1:]:
                total = torch.add(total, one.values(number), out=part)
            torch.div(total, workers, out=part)
        return Dense(mean)
    mean.zero_()
    senders = torch.zeros_like(mean) if over_senders else None
    for one in chain([first], rest):
        one.add_to(mean)
        if senders is not None and isinstance(one, Sparse):
            Sparse(one.indices, torch.ones_like(one.values)).add_to(senders)
    return Dense(mean.div_(workers if senders is None else senders.clamp_(min=1)))


def all_finite(flat: torch.Tensor) -> torch.Tensor:
    """True if `flat` has no NaN or infinity: 0-d bool, on its device.

    On a CPU a sum, which takes a third of the time, answers first; where it overflows, each element is looked at. A
    GPU's host would wait for the sum.
    """
    if flat.is_cuda:
        return (
            torch.linalg.vector_norm(flat, torch.inf).isfinite() if len(flat) else flat.new_ones((), dtype=torch.bool)
        )
    finite = flat.sum().isfinite()
    return finite if finite else flat.isfinite().all()
