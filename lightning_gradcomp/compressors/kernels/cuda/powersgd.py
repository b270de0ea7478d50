"""PowerSGD's products of all matrices at once: M Q, Mᵀ P and P Qᵀ.

The factors of all matrices are packed end to end: each P row by row, sorted by the number of rows, so that those of one
number are neighbours; each Q column by column, in the layout's order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl

from lightning_gradcomp.compressors.kernels.cuda import launch
from lightning_gradcomp.compressors.kernels.cuda.segments import SMALL, Blocks, block, blocks_of, cut, deliver, on
from lightning_gradcomp.compressors.kernels.cuda.statistics import largest

ROWS, COLUMNS = 16, 64
"""Size of the part of a matrix that a program reads at a time."""


@dataclass(frozen=True)
class Tables:
    """What the kernels and functions here read about matrices.

    Args:
        rank: r.
        runs: (matrices, rows) of each number of rows, ascending.
        matrices: each matrix's start in the flat buffer, its rows, its columns, and the starts of its P and its Q:
            int64 [matrices, 5].
        rows: the blocks of rows of all matrices.
        columns: the blocks of columns of all matrices.
        ps: the blocks of P's, sorted.
        p_numbers: the number of the P that holds each element of the packed P's, int64.
        q_columns: the blocks of the columns of Q's.
        q_numbers: the number of the column that holds each element of the packed Q's, int64.
        q_sizes: elements of each Q.
    """

    rank: int
    runs: tuple[tuple[int, int], ...]
    matrices: torch.Tensor
    rows: Blocks
    columns: Blocks
    ps: Blocks
    p_numbers: torch.Tensor
    q_columns: Blocks
    q_numbers: torch.Tensor
    q_sizes: tuple[int, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Constants of the kernels. A tensor core's factor has 16 columns or more."""
        return {
            "RANK": self.rank,
            "WIDTH": max(16, triton.next_power_of_2(self.rank)),
            "ROWS": ROWS,
            "COLUMNS": COLUMNS,
        }


@cache
def tables_of(shapes: tuple[tuple[int, int], ...], rank: int, device: torch.device) -> Tables:
    """The tables of consecutive matrices of these shapes, cached."""
    rows, columns = np.array(shapes).T
    order = np.argsort(rows, kind="stable")
    stops = rank * rows[order].cumsum()
    starts = stops - rank * rows[order]
    p_at = np.empty_like(rows)
    p_at[order] = starts
    lengths = np.repeat(columns, rank)
    q_stops = lengths.cumsum()
    q_starts = q_stops - lengths
    numbers, counts = np.unique(rows, return_counts=True)
    matrices = [(rows * columns).cumsum() - rows * columns, rows, columns, p_at, q_starts[::rank]]
    return Tables(
        rank,
        tuple(zip(counts.tolist(), numbers.tolist(), strict=True)),
        on(torch.tensor(np.stack(matrices, 1)), device),
        blocks_of(tuple((0, each) for each in rows.tolist()), device, ROWS),
        blocks_of(tuple((0, each) for each in columns.tolist()), device, COLUMNS),
        cut(starts, stops, device, SMALL),
        on(torch.tensor(np.repeat(np.arange(len(rows)), stops - starts)), device),
        cut(q_starts, q_stops, device, SMALL),
        on(torch.tensor(np.repeat(np.arange(len(lengths)), lengths)), device),
        tuple((rank * columns).tolist()),
    )


def times(flat: torch.Tensor, q: torch.Tensor, tables: Tables) -> torch.Tensor:
    """M Q of all matrices in `flat` (fp32 [n]): the packed P's."""
    p = flat.new_empty(len(tables.p_numbers))
    launch(_times, tables.rows.count, flat, q, tables.rows.table, tables.matrices, p, **tables.sizes)
    return p


def transposed_times(flat: torch.Tensor, p: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Mᵀ P of all matrices in `flat` (fp32 [n]): the packed Q's."""
    q = flat.new_empty(len(tables.q_numbers))
    launch(_transposed_times, tables.columns.count, flat, p, tables.columns.table, tables.matrices, q, **tables.sizes)
    return q


def outer(p: torch.Tensor, q: torch.Tensor, tables: Tables, out: torch.Tensor, sign: int) -> None:
    """Deliver P Qᵀ of all matrices to `out` (fp32 [n]), as `deliver` does."""
    launch(_outer, tables.rows.count, p, q, tables.rows.table, tables.matrices, out, SIGN=sign, **tables.sizes)


def orthonormal(p: torch.Tensor, tables: Tables) -> torch.Tensor:
    """`orthonormal` (compressors/powersgd.py) of each of the packed P's."""
    scales = largest(p, tables.ps)
    unit = p / torch.where(scales > 0, scales, 1)[tables.p_numbers]
    lengths = [many * rows * tables.rank for many, rows in tables.runs]
    for (many, rows), own in zip(tables.runs, unit.split(lengths), strict=True):
        own = own.view(many, rows, tables.rank)
        own.copy_(torch.linalg.qr(own)[0])
    unit.view(-1, tables.rank).mul_((p != 0).view(-1, tables.rank).any(1, keepdim=True))
    return unit


def next_queries(q: torch.Tensor, old: torch.Tensor, tables: Tables) -> list[torch.Tensor]:
    """Each of the packed Q's divided by its largest magnitude, fp32 [columns, r]; the old column for one of zeros."""
    most = largest(q, tables.q_columns)
    scales = most.view(-1, tables.rank).amax(1, keepdim=True).expand(-1, tables.rank).reshape(-1)
    found = torch.where((most > 0)[tables.q_numbers], q / scales[tables.q_numbers], old)
    return [each.view(tables.rank, -1).mT for each in found.split(tables.q_sizes)]


@triton.jit
def _matrix(table, matrices, SIZE: tl.constexpr):
    """This program's rows or columns of a matrix; its start, rows and columns; the starts of its P and its Q."""
    first, _, matrix = block(table)
    entry = matrices + 5 * matrix
    start, rows, columns = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    return first + tl.arange(0, SIZE), start, rows, columns, tl.load(entry + 3), tl.load(entry + 4)


@triton.jit
def _load_m(flat, row, column, rows, columns):
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    return tl.load(flat + row[:, None] * columns + column[None, :], mask=inside, other=0.0)


@triton.jit
def _load_p(p, row, rows, RANK: tl.constexpr, WIDTH: tl.constexpr):
    k = tl.arange(0, WIDTH)
    return tl.load(p + row[:, None] * RANK + k[None, :], mask=(row[:, None] < rows) & (k[None, :] < RANK), other=0.0)


@triton.jit
def _load_q(q, column, columns, RANK: tl.constexpr, WIDTH: tl.constexpr):
    """Qᵀ of these columns."""
    k = tl.arange(0, WIDTH)
    inside = (k[:, None] < RANK) & (column[None, :] < columns)
    return tl.load(q + k[:, None] * columns + column[None, :], mask=inside, other=0.0)


@triton.jit
def _times(
    flat, q, table, matrices, p,
    RANK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """P of a block of rows."""
    row, start, rows, columns, p_at, q_at = _matrix(table, matrices, ROWS)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for begin in range(0, columns, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        m = _load_m(flat + start, row, column, rows, columns)
        sums = tl.dot(m, tl.trans(_load_q(q + q_at, column, columns, RANK, WIDTH)), sums, input_precision="ieee")
    k = tl.arange(0, WIDTH)
    tl.store(p + p_at + row[:, None] * RANK + k[None, :], sums, mask=(row[:, None] < rows) & (k[None, :] < RANK))


@triton.jit
def _transposed_times(
    flat, p, table, matrices, q,
    RANK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Q of a block of columns."""
    column, start, rows, columns, p_at, q_at = _matrix(table, matrices, COLUMNS)
    sums = tl.zeros([COLUMNS, WIDTH], tl.float32)
    for begin in range(0, rows, ROWS):
        row = begin + tl.arange(0, ROWS)
        m = _load_m(flat + start, row, column, rows, columns)
        sums = tl.dot(tl.trans(m), _load_p(p + p_at, row, rows, RANK, WIDTH), sums, input_precision="ieee")
    k = tl.arange(0, WIDTH)
    inside = (column[:, None] < columns) & (k[None, :] < RANK)
    tl.store(q + q_at + k[None, :] * columns + column[:, None], sums, mask=inside)


@triton.jit
def _outer(
    p, q, table, matrices, out,
    SIGN: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """P Qᵀ of a block of rows."""
    row, start, rows, columns, p_at, q_at = _matrix(table, matrices, ROWS)
    own = _load_p(p + p_at, row, rows, RANK, WIDTH)
    for begin in range(0, columns, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        values = tl.dot(own, _load_q(q + q_at, column, columns, RANK, WIDTH), input_precision="ieee")
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        deliver(out, start + row[:, None] * columns + column[None, :], inside, values, SIGN)
