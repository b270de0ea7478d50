"""Rows of one or several lengths, laid end to end: a number from each row, and a number of each row for its elements.

Rows of one length are a matrix. On a GPU, rows of several lengths take a few calls too, whatever their number. A step
then launches dozens of kernels instead of thousands. A CPU takes a run of equal rows at a time, in a tenth of the time
of `segment_reduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from lightning_gradcomp.compressors.kernels.bits import zeros
from lightning_gradcomp.compressors.layout import chunks


@dataclass(frozen=True)
class Rows:
    """Rows laid end to end in a tensor.

    Args:
        runs: (number of rows, elements of each) for consecutive rows of one length.
    """

    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Rows:
        return cls.join((1, size) for size in sizes)

    @classmethod
    def join(cls, runs: Iterable[tuple[int, int]]) -> Rows:
        """Rows of these runs; neighbours may have the same length."""
        return cls(tuple((sum(many for many, _ in same), size) for size, same in groupby(runs, key=itemgetter(1))))

    @classmethod
    def cut(cls, n: int, size: int) -> Rows:
        """n elements in rows of `size`; the last one may be shorter."""
        return cls(tuple((many, each) for many, each in ((n // size, size), (1, n % size)) if many and each))

    @cached_property
    def many(self) -> int:
        return sum(many for many, _ in self.runs)

    @cached_property
    def n(self) -> int:
        return sum(many * size for many, size in self.runs)

    @property
    def equal(self) -> bool:
        return len(self.runs) == 1

    def view(self, x: torch.Tensor) -> torch.Tensor:
        """x [n] as [m, n / m] if all rows have one length; otherwise x."""
        return x.view(self.runs[0]) if self.equal else x

    def sizes(self, device: torch.device) -> int | torch.Tensor:
        """Elements of each row: a number, or int64 [m] if they differ."""
        return self.runs[0][1] if self.equal else _sizes(self.runs, device)

    def sum(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The sum of each row of x [n]: [m]."""
        if self.equal:
            return self.view(x).sum(1, dtype=dtype)
        if x.is_cuda:
            x = x.float()
            return torch.segment_reduce(x, "sum", lengths=_sizes(self.runs, x.device), unsafe=True)
        return torch.cat([Rows((run,)).sum(x[begin:end], dtype) for run, _, (begin, end) in self.places])

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """The largest magnitude of each row of x (fp32 [n]): fp32 [m]."""
        if self.equal:
            rows = self.view(x)
            return torch.maximum(rows.amax(1), -rows.amin(1))  # aminmax of rows takes ten times as long
        if x.is_cuda:
            return torch.segment_reduce(x.abs(), "max", lengths=_sizes(self.runs, x.device), unsafe=True)
        return torch.cat([Rows((run,)).largest(x[begin:end]) for run, _, (begin, end) in self.places])

    def mean(self, f: Callable[..., torch.Tensor], x: torch.Tensor, *numbers: torch.Tensor) -> torch.Tensor:
        """The mean over each row of f(x, *spread numbers), where f works element by element: fp32 [m].

        A long row is computed in parts that stay in a CPU's cache.
        """
        if self.many > 1:
            return self.sum(f(self.view(x), *self.spread(*numbers)).view(-1)) / self.sizes(x.device)
        sums = [f(x[start:stop], *numbers).sum(0, keepdim=True) for start, stop in chunks(0, self.n, x.device)]
        return (sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)) / self.n

    def spread(self, *numbers: torch.Tensor) -> list[torch.Tensor]:
        """Each of `numbers` [m, ...] for all elements of its row, to combine with `view(x)`: [m, 1] or [n]."""
        if self.equal:
            return [each.unsqueeze(1) for each in numbers]
        device = numbers[0].device if numbers else None
        if device is not None and device.type == "cuda":
            numbers_of_rows = torch.repeat_interleave(_sizes(self.runs, device), output_size=self.n)
            return [each.index_select(0, numbers_of_rows) for each in numbers]
        return [
            torch.cat([each[first:last].repeat_interleave(run[1]) for run, (first, last), _ in self.places])
            for each in numbers
        ]

    def parts(self, x: torch.Tensor, *numbers: torch.Tensor, multiple: int = 1) -> Iterator[list[torch.Tensor]]:
        """Yield `view(x)` and the spread numbers at once, or, of a single long row, parts that stay in a CPU's cache.

        The length of all parts but the last is a multiple of `multiple`.
        """
        if self.many > 1:
            yield [self.view(x), *self.spread(*numbers)]
            return
        for start, stop in chunks(0, self.n, x.device, multiple=multiple):
            yield [x[start:stop], *numbers]

    def pad(self, x: torch.Tensor, multiple: int) -> torch.Tensor:
        """x [n] with zeros after each row, up to a multiple of `multiple` elements.

        If there is a single row, x may be the last part of it.
        """
        x = x.view(-1)
        if self.many == 1:
            return torch.nn.functional.pad(x, (0, -len(x) % multiple)) if len(x) % multiple else x
        if all(size % multiple == 0 for _, size in self.runs):
            return x
        if self.equal:
            return torch.nn.functional.pad(self.view(x), (0, -self.runs[0][1] % multiple)).view(-1)
        padding = zeros(multiple, x.dtype, x.device)
        rows = x.split([size for many, size in self.runs for _ in range(many)])
        return torch.cat([part for row in rows for part in (row, padding[: -len(row) % multiple])])

    def unpad(self, x: torch.Tensor, multiple: int) -> torch.Tensor:
        if all(size % multiple == 0 for _, size in self.runs):
            return x
        if self.equal:
            many, size = self.runs[0]
            return x.view(many, -1)[:, :size].reshape(-1)
        sizes = [size for many, size in self.runs for _ in range(many)]
        rows = x.split([size + -size % multiple for size in sizes])
        return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])

    @cached_property
    def places(self) -> list[tuple[tuple[int, int], tuple[int, int], tuple[int, int]]]:
        """Each run, the (start, stop) of its rows, and of its elements."""
        found, row, element = [], 0, 0
        for many, size in self.runs:
            found.append(((many, size), (row, row + many), (element, element + many * size)))
            row, element = row + many, element + many * size
        return found


def places(blocks: torch.Tensor, at_once: int) -> Iterator[Any]:
    """Indices of `blocks` [..., m, size] that together cover it: all blocks on a GPU, `at_once` of a row on a CPU."""
    if blocks.is_cuda:
        if blocks.numel():
            yield ...
        return
    *leading, m, _ = blocks.shape
    for row in np.ndindex(*leading):
        for begin in range(0, m, at_once):
            yield *row, slice(begin, min(begin + at_once, m))


@cache
def row_of(n: int) -> Rows:
    return Rows(((1, n),))


@cache
def _sizes(runs: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    """Elements of each row: int64 [m]."""
    sizes = torch.tensor([size for many, size in runs for _ in range(many)])
    return sizes.to(device, non_blocking=True)
