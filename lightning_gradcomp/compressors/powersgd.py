"""PowerSGD: Vogels, Karimireddy, Jaggi, NeurIPS 2019, arXiv 1905.13727, Algorithms 1 and 2.

Each gradient, seen as a matrix M [out, rest], travels as two thin factors: P = M Q, averaged and orthonormalised, then
Q = Mᵀ P, averaged. The result is P Qᵀ. Averages of factors are factors of the average. So both travel by
all-reduce, one for all P's and one for all Q's, and bytes don't grow with the number of ranks. Q is the query of the
next step.

The residual is local: M - P Q_localᵀ, as in the paper's Algorithm 2 and in the authors' epfml/powersgd package, which
subtracts the local factor before the all-reduce. The code of the paper's experiments (`RankKReducer`) and torch's hook
subtract the averaged P Qᵀ instead. Training is the same either way, but their residual is a random walk: it keeps each
rank's difference from the mean forever.

With Adam and AdamW, M is Adam's step plus the unsent steps (updates.py) instead of gradient plus residual. This is not
in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, reduce
from math import prod
from typing import ClassVar, NamedTuple
from zlib import crc32

import torch

from lightning_gradcomp.compressors.base import DENSE_START, Card, Collectives, LossyCompressor
from lightning_gradcomp.compressors.decoded import Chunked, Decoded, Dense, all_finite
from lightning_gradcomp.compressors.error_feedback import ErrorFeedback, Gradient, StateDict
from lightning_gradcomp.compressors.kernels.rows import Rows
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.updates import AdamStep, is_adam
from lightning_gradcomp.errors import check_whole, is_number, refusal
from lightning_gradcomp.registry import register


def orthonormal(p: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis (fp32 [..., m, r], r ≤ m) of the columns of p. Rows of zeros stay zeros.

    Householder QR never divides by a column's length, so columns of zeros are safe. Scaling p first keeps tiny
    gradients from underflowing. Rounding, and the columns that complete a rank-deficient p, would make rows of
    zeros nonzero, which Adam would turn into full steps.
    """
    scale = p.abs().amax((-2, -1), keepdim=True).clamp_(min=torch.finfo(p.dtype).tiny)
    basis = torch.linalg.qr(p / scale)[0]
    return basis.mul_((p != 0).any(-1, keepdim=True))


def query(name: str, rows: int, rank: int, device: torch.device, step: int = 0) -> torch.Tensor:
    """An initial Q [rows, rank]: normal numbers seeded by the parameter's name and the step, the same on every rank."""
    seed = f"{name} {step}" if step else name  # a CPU generator uses 32 bits of it
    generator = torch.Generator().manual_seed(crc32(seed.encode()))
    return torch.randn(rows, rank, generator=generator, dtype=torch.float32).to(device, non_blocking=True)


class Batch(NamedTuple):
    """Matrices of one shape (rows, columns), which one call multiplies.

    Args:
        numbers: the tensors' indices in the layout.
        bounds: where each is in the flat buffer.
    """

    numbers: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]
    shape: tuple[int, int]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The matrices in `flat`, [m, rows, columns]. Neighbours share its memory."""
        start, stop = self.bounds[0][0], self.bounds[-1][1]
        if stop - start == len(self.bounds) * prod(self.shape):
            return flat[start:stop].view(-1, *self.shape)
        return torch.stack([flat[start:stop].view(self.shape) for start, stop in self.bounds])


class Factors:
    """Factors with r columns of the matrices of a piece, batch after batch: P (`side` 0) or Q (1)."""

    def __init__(self, batches: Sequence[Batch], side: int, r: int) -> None:
        self._shapes = [(len(batch.numbers), batch.shape[side], r) for batch in batches]
        self._rows = Rows.join((many, length * r) for many, length, _ in self._shapes)
        self._longest, self._r = max(size for _, size in self._rows.runs), r
        self.n = self._rows.n

    def of(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Each batch's factors [m, length, r] in `packed` [n], sharing its memory."""
        if len(self._shapes) == 1:
            return [packed.view(self._shapes[0])]
        parts = packed.split([prod(shape) for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def padded(self, packed: torch.Tensor) -> torch.Tensor:
        """All factors as [matrices, longest length, r], with rows of zeros after shorter ones."""
        return self._rows.pad(packed, self._longest).view(self._rows.many, -1, self._r)

    def packed(self, padded: torch.Tensor) -> torch.Tensor:
        return self._rows.unpad(padded.reshape(-1), self._longest)


class Piece(NamedTuple):
    """Matrices that are averaged at once, from `start` to `stop` of the flat buffer, by shape, and their factors."""

    start: int
    stop: int
    batches: list[Batch]
    p: Factors
    q: Factors

    def numbers(self) -> list[int]:
        return [number for batch in self.batches for number in batch.numbers]

    def products(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """P Qᵀ of each matrix, in the buffer's order: fp32 [stop - start]."""
        found = [own @ other.mT for own, other in zip(self.p.of(p), self.q.of(q), strict=True)]
        if len(found) == 1:
            return found[0].view(-1)
        pairs = zip(self.batches, found, strict=True)
        named = {number: product for batch, each in pairs for number, product in zip(batch.numbers, each, strict=True)}
        return torch.cat([named[number].view(-1) for number in sorted(named)])


@cache
def pieces_of(layout: Layout, r: int, device: torch.device) -> list[Piece]:
    """The pieces of a layout's matrices, whose factors have r columns."""
    found, number = [], 0
    for piece in layout.pieces(device):
        by_shape: dict[tuple[int, int], list[tuple[int, tuple[int, int]]]] = {}
        for shape, (start, stop) in zip(piece.layout.shapes, piece.layout.bounds, strict=True):
            matrix = by_shape.setdefault((shape[0], prod(shape[1:])), [])
            matrix.append((number, (piece.start + start, piece.start + stop)))
            number += 1
        batches = [
            Batch(tuple(number for number, _ in places), tuple(bounds for _, bounds in places), shape)
            for shape, places in by_shape.items()
        ]
        stop = piece.start + piece.layout.n
        found.append(Piece(piece.start, stop, batches, Factors(batches, 0, r), Factors(batches, 1, r)))
    return found


class Queries(ErrorFeedback):
    """Each matrix keeps a query Q for the next step, the same on all ranks."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def start(self, layout: Layout, device: torch.device) -> ErrorFeedback:
        rows = (prod(shape[1:]) for shape in layout.shapes)
        self.queries = [query(name, m, self._rank, device) for name, m in zip(layout.names, rows, strict=True)]
        self.next_queries = self.queries
        """The queries after this step is committed."""
        return super().start(layout, device)

    def commit(self, stepped: Set[str], out: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.layout.names, self.queries, self.next_queries, strict=True)
        self.queries = self.next_queries = [new if name in stepped else old for name, old, new in pairs]
        return super().commit(stepped, out)

    def state_dict(self) -> StateDict:
        queries = {name: q.clone() for name, q in zip(self.layout.names, self.queries, strict=True)}
        return {**super().state_dict(), "query": queries}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        queries = []
        for name, q in zip(self.layout.names, self.queries, strict=True):
            saved = state["query"].get(name, q)
            if saved.shape != q.shape:
                raise ValueError(f"query of {name!r}: got shape {tuple(saved.shape)}, allowed: {tuple(q.shape)}")
            queries.append(saved.to(q.device, copy=True))
        self.queries = self.next_queries = queries
        super().load_state_dict(state)


class GradientAndQueries(Queries, Gradient):
    """The gradient accumulates."""


class AdamStepAndQueries(Queries, AdamStep):
    """Adam's step accumulates."""


@register("powersgd")
@dataclass(kw_only=True)
class PowerSGD(LossyCompressor):
    """PowerSGD: low-rank factors, two all-reduces a step, error feedback; for any optimizer.

    Source: Vogels et al., NeurIPS 2019, arXiv 1905.13727, algorithms 1 and 2. With Adam and AdamW it compresses their
    step instead of the gradient, which is not in the paper.

    Args:
        rank: r, the number of columns of the factors. A higher rank is closer to the gradient and sends more. The
            paper uses 1, 2 and 4 over 300 epochs; on short runs rank 2 loses accuracy.
        warm_start: begin each step's power iteration with the previous step's Q; otherwise with a random Q.
        min_compression: a matrix is compressed only if its factors are more than this many times smaller.
        warmup_steps: dense steps before the compression begins. `None` means 22 (the paper has none, but raises the
            learning rate over five epochs; torch's hook waits for 1,000 steps).
    """

    card: ClassVar[Card] = Card(
        sends="two thin fp32 factors of each matrix, as averages",
        pick="many ranks: it needs only all-reduces, so its bytes do not grow",
        source="[Vogels et al. 2019](https://arxiv.org/abs/1905.13727)",
    )
    default_warmup_steps: ClassVar[int] = DENSE_START

    rank: int = 4
    warm_start: bool = True
    min_compression: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dense_values != "fp32":
            raise refusal("PowerSGD.dense_values", self.dense_values, "fp32, in which averages are added")
        check_whole("PowerSGD.rank", self.rank, 1)
        if not is_number(self.min_compression) or self.min_compression < 1:
            raise refusal("PowerSGD.min_compression", self.min_compression, "a finite number from 1")

    def compresses(self, name: str, shape: tuple[int, ...]) -> bool:
        if not super().compresses(name, shape):
            return False
        out, rest = shape[0], prod(shape[1:])
        small = (out + rest) * self.rank * self.min_compression < out * rest
        return small and self.rank <= min(out, rest)

    def check_shards(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        for name, shape in shapes.items():
            if (least := min(shape[0], prod(shape[1:]))) < self.rank:
                got = f"a shard of {name!r} with {least}"
                allowed = f"{self.rank} or more: a lower rank, fewer ranks in a replica, or exclude=[{name!r}]"
                raise refusal(f"rows or columns with PowerSGD(rank={self.rank})", got, allowed)

    def state_for(self, optimizer: torch.optim.Optimizer | None) -> ErrorFeedback:
        return AdamStepAndQueries(self.rank) if is_adam(optimizer) else GradientAndQueries(self.rank)

    def messages(self, layout: Layout) -> list[tuple[str, int]]:
        out = sum(shape[0] for shape in layout.shapes)
        rest = sum(prod(shape[1:]) for shape in layout.shapes)
        return [("mean", 4 * self.rank * out), ("mean", 4 * self.rank * rest)]

    def average(
        self, flat: torch.Tensor, layout: Layout, collectives: Collectives, state: Queries
    ) -> tuple[Decoded, Chunked]:
        """One power iteration: P = orth(mean M Q), Q = mean Mᵀ P. The average is P Qᵀ, and P Q_localᵀ was sent.

        On a CPU neither product is stored. Each is computed when it is used, a piece at a time.
        """
        pieces = pieces_of(layout, self.rank, flat.device)
        matrices = [[batch.of(flat) for batch in piece.batches] for piece in pieces]
        queries = [torch.cat([state.queries[number].view(-1) for number in piece.numbers()]) for piece in pieces]
        products = [
            (m @ q).view(-1)
            for piece, own, packed in zip(pieces, matrices, queries, strict=True)
            for m, q in zip(own, piece.q.of(packed), strict=True)
        ]
        packed = collectives.mean(torch.cat(products))
        collectives.now("compress")
        parts = packed.split([piece.p.n for piece in pieces])
        ps = [piece.p.packed(orthonormal(piece.p.padded(part))) for piece, part in zip(pieces, parts, strict=True)]
        local = [
            torch.cat([(m.mT @ p).view(-1) for m, p in zip(own, piece.p.of(packed), strict=True)])
            for piece, own, packed in zip(pieces, matrices, ps, strict=True)
        ]
        del matrices  # copies of those that are no neighbours
        packed = collectives.mean(torch.cat(local))
        collectives.now("decompress")
        qs = packed.split([piece.q.n for piece in pieces])
        # |P Qᵀ| ≤ r · max|Q|, since no element of an orthonormal P exceeds 1.
        finite = reduce(torch.logical_and, map(all_finite, [packed * self.rank, *ps]))
        if self.warm_start:
            state.next_queries = self._next_queries(pieces, qs, queries)
        else:  # with a fixed Q, what lies outside its span would never be sent
            state.next_queries = self._new_queries(layout, state, collectives.step + 1)
        places = [(piece.start, piece.stop) for piece in pieces]
        sent = Chunked(places, lambda i: pieces[i].products(ps[i], local[i]))
        mean = Chunked(places, lambda i: pieces[i].products(ps[i], qs[i]), finite)
        if not flat.is_cuda:
            return mean, sent
        whole = collectives.buffer()  # a dense mean is written to all gradients by one call
        for number, (start, stop) in enumerate(places):
            whole[start:stop] = mean.values(number)
        return Dense(whole), sent

    def _next_queries(
        self, pieces: Sequence[Piece], qs: Sequence[torch.Tensor], before: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The averaged Q of each tensor, divided by its largest magnitude.

        Only the span matters. A Q at the gradient's scale would give M Q its square, and under- or overflow. A column
        of zeros keeps its old query: as zeros it would never find anything.
        """
        found: dict[int, torch.Tensor] = {}
        for piece, packed, old in zip(pieces, qs, before, strict=True):
            q = piece.q.padded(packed)
            largest = q.abs().amax((1, 2), keepdim=True)
            scaled = torch.where((q != 0).any(1, keepdim=True), q / largest, piece.q.padded(old))
            each = [matrix for batch in piece.q.of(piece.q.packed(scaled)) for matrix in batch.unbind()]
            found.update(zip(piece.numbers(), each, strict=True))
        return [found[number] for number in range(len(found))]

    def _new_queries(self, layout: Layout, state: Queries, step: int) -> list[torch.Tensor]:
        named = zip(layout.names, state.queries, strict=True)
        return [query(name, len(q), self.rank, q.device, step) for name, q in named]
