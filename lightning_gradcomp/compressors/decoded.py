"""Decoded payloads: some entries of a flat buffer, all of them, or chunks that are decoded on demand."""

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
        """Indices are distinct, so the order of additions does not matter."""
        flat.index_add_(0, self.indices, self.values)

    def subtract_from(self, flat: torch.Tensor) -> None:
        flat.index_add_(0, self.indices, self.values, alpha=-1)

    def zero(self, flat: torch.Tensor) -> None:
        flat.index_fill_(0, self.indices, 0)

    def finite(self) -> torch.Tensor:
        return all_finite(self.values)

    def only(self, keep: torch.Tensor) -> KeptSparse:
        """The entries that `keep` (bool [k]) marks. They are not counted, since the host would wait for the GPU."""
        return KeptSparse(self.indices, torch.where(keep, self.values, 0), keep)


@dataclass(frozen=True)
class KeptSparse(Sparse):
    """The entries that `keep` (bool [k]) marks; the other entries have value 0."""

    keep: torch.Tensor

    def zero(self, flat: torch.Tensor) -> None:
        flat[self.indices] = torch.where(self.keep, 0, flat[self.indices])


@dataclass(frozen=True)
class Dense:
    """A value for each element of a flat buffer, fp32 [n]."""

    values: torch.Tensor

    def add_to(self, flat: torch.Tensor) -> None:
        flat.add_(self.values)

    def subtract_from(self, flat: torch.Tensor) -> None:
        flat.sub_(self.values)

    def zero(self, flat: torch.Tensor) -> None:
        flat.zero_()

    def finite(self) -> torch.Tensor:
        return all_finite(self.values)


@dataclass(frozen=True)
class Chunked:
    """A value for each element of a flat buffer, decoded one chunk at a time each time it is used.

    Decoding is fast, and so is adding a chunk that is still in the processor's cache. A second buffer of the same size
    would cost more than both.

    Args:
        chunks: (start, stop) of each chunk; together they cover the buffer.
        values: maps the number of a chunk to its values, fp32 [stop - start].
        is_finite: True if all values are finite, 0-d bool. Required for a mean, which is checked before it is applied.
    """

    chunks: Sequence[tuple[int, int]]
    values: Callable[[int], torch.Tensor]
    is_finite: torch.Tensor | None = None

    def add_to(self, flat: torch.Tensor) -> None:
        for number, (start, stop) in enumerate(self.chunks):
            flat[start:stop].add_(self.values(number))

    def subtract_from(self, flat: torch.Tensor) -> None:
        for number, (start, stop) in enumerate(self.chunks):
            flat[start:stop].sub_(self.values(number))

    def zero(self, flat: torch.Tensor) -> None:
        flat.zero_()

    def finite(self) -> torch.Tensor:
        assert self.is_finite is not None
        return self.is_finite


Decoded = Sparse | Dense | Chunked

EMPTY = Chunked((), lambda number: torch.empty(0, dtype=torch.float32))
"""The decoded payload of an empty buffer."""


def concatenate(parts: Sequence[Decoded], starts: Sequence[int]) -> Sparse | Chunked:
    """Join the decoded payloads of slices that begin at `starts`. Either all are sparse, or none is."""
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
    """Yield for each tensor of `layout` positions (int64 [k]) and their values, or None and a value for each element.

    Each chunk of a `Chunked` mean must hold one or more whole tensors. It is decoded when its first tensor is reached.
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
    """A view of `tensor`, and the index in it of the elements at flat positions `places` (int64 [k])."""
    if tensor.is_contiguous():
        return tensor.view(-1), (places,)
    return tensor, torch.unravel_index(places, tensor.shape)  # e.g. channels last


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
    """The mean of all workers' payloads. They are added in worker order, so it is bit-identical on every rank.

    Args:
        decoded: one payload per worker, all of the same class. With many sparse entries, an iterator can decode each
            worker's payload after the previous one was added.
        buffer: returns fp32 [n] with arbitrary content, for a mean that is not sparse.
        over_senders: divide each element's sum by the number of payloads in which it is not 0. All must be sparse.
    """
    rest = iter(decoded)
    first = next(rest)
    if isinstance(first, Sparse) and len(first.indices) * workers * MERGE_COST < n and not first.values.is_cuda:
        entries = [first, *(one for one in rest if isinstance(one, Sparse))]  # the host would wait for a GPU's count
        indices, places = torch.unique(torch.cat([one.indices for one in entries]), return_inverse=True)
        values = torch.zeros(len(indices), dtype=torch.float32).index_add_(
            0, places, torch.cat([one.values for one in entries])
        )
        return Sparse(indices, values.div_(_senders(entries, places) if over_senders else workers))
    mean = buffer()
    if isinstance(first, Chunked):  # same chunks in all: one chunk of all workers at a time, in the cache
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
            Sparse(one.indices, one.values.sign().abs()).add_to(senders)
    return Dense(mean.div_(workers if senders is None else senders.clamp_(min=1)))


def _senders(entries: list[Sparse], places: torch.Tensor) -> torch.Tensor:
    """How many of the entries at each of the places are not 0, at least 1."""
    sent = torch.cat([one.values.sign().abs() for one in entries])
    return torch.bincount(places, weights=sent).clamp_(min=1)


def all_finite(flat: torch.Tensor) -> torch.Tensor:
    """True if `flat` has no NaN or infinity: 0-d bool, on its device.

    A CPU first checks the sum, which takes a third of the time. Only if the sum is not finite, it checks each element.
    On a GPU the host would wait for the sum.
    """
    if flat.is_cuda:
        return (
            torch.linalg.vector_norm(flat, torch.inf) < torch.inf if len(flat) else flat.new_ones((), dtype=torch.bool)
        )
    finite = flat.sum().isfinite()
    return finite if finite else flat.isfinite().all()
