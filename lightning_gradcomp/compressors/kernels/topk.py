"""Top-k: exactly the k entries of a tensor that are largest in magnitude.

The DGC paper (Lin et al. 2018, §3.1 "hierarchical selection") samples 0.1-1 % of the tensor to estimate a threshold.
Its authors' code runs an exact search if more than 1.3 k entries pass. Between k and 1.3 k it keeps the first k in
index order, and it may send 0.8 k. Here the sampled threshold is deliberately low: the few entries that pass contain
the k largest, and an exact search among them finds these. If fewer than k pass, the search runs on all entries.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch

from lightning_gradcomp.compressors.kernels.rows import Rows
from lightning_gradcomp.compressors.layout import CHUNK, chunks

SAMPLE_AT_LEAST = 65_536
"""Shorter tensors are searched whole, since a sample would cost as much."""


def count(n: int, density: float) -> int:
    """k = ceil(n · density), at least 1. The product is rounded first, since 1 - 0.999 is slightly above 0.001.

    >>> count(2_359_296, 1 - 0.999), count(1000, 1 - 0.999), count(5, 0.001)
    (2360, 1, 1)
    """
    return max(1, math.ceil(round(n * density, 6)))


def count_each(rows: Rows, density: float) -> int:
    return sum(many * count(size, density) for many, size in rows.runs)


def topk_each(flat: torch.Tensor, rows: Rows, density: float) -> torch.Tensor:
    """Indices in `flat` (int64, ascending) of the `count(size, density)` largest entries of each of its rows."""
    if flat.is_cuda:
        return _topk_of_equal_sizes(flat, rows, density)
    return torch.cat(
        [
            topk_rows(flat[begin:end].view(-1, size), count(size, density)) + begin
            for (_, size), _, (start, stop) in rows.places
            for begin, end in chunks(start, stop, flat.device, multiple=size)
        ]
    )


def _topk_of_equal_sizes(flat: torch.Tensor, rows: Rows, density: float) -> torch.Tensor:
    """`topk_each` on a GPU: one search for all rows of a size, since a search launches about twenty kernels."""
    by_size: dict[int, list[tuple[int, int]]] = {}
    for (_, size), _, place in rows.places:
        by_size.setdefault(size, []).append(place)
    places = [place for same in by_size.values() for place in same]
    magnitude = torch.cat([flat[start:stop] for start, stop in places]).abs_()
    many = [sum(stop - start for start, stop in same) for same in by_size.values()]
    found, runs = [], []
    for size, own in zip(by_size, magnitude.split(many), strict=True):
        k = count(size, density)
        found.append(torch.topk(own.view(-1, size), k, sorted=False).indices.view(-1))
        runs.append((own.numel() // size, k))
    begins = [begin for size, same in by_size.items() for place in same for begin in range(*place, size)]
    selected = Rows.join(runs)
    [begin] = selected.spread(on_device(tuple(begins), flat.device))
    return (selected.view(torch.cat(found)) + begin).view(-1).sort().values


@cache
def on_device(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers).to(device, non_blocking=True)


def topk_rows(x: torch.Tensor, k: int) -> torch.Tensor:
    """Flat indices (int64, ascending) of the k entries of each row of x (fp32 [m, n], on a CPU), as in `topk`."""
    rows, n = x.shape
    if rows == 1 or n >= SAMPLE_AT_LEAST:
        return torch.cat([topk(row, k) + number * n for number, row in enumerate(x)])
    magnitude = np.abs(x.numpy())
    passes = magnitude >= np.partition(magnitude, n - k, axis=1)[:, n - k, None]
    for row in np.flatnonzero(np.count_nonzero(passes, axis=1) > k):  # ties at the threshold
        passes[row] = False
        passes[row, exact(magnitude[row], k)] = True
    return torch.from_numpy(np.flatnonzero(passes))


def topk(x: torch.Tensor, k: int) -> torch.Tensor:
    """Indices (int64, ascending) of the k entries of x (fp32 [n]) that are largest in magnitude."""
    if x.is_cuda:
        return torch.topk(x.abs(), k, sorted=False).indices.sort().values
    entries = x.numpy()
    return torch.from_numpy(sampled(entries, k) if len(entries) >= SAMPLE_AT_LEAST else exact(np.abs(entries), k))


def sampled(x: np.ndarray, k: int) -> np.ndarray:
    """`exact` of |x|, searched only among the entries above a threshold from a strided sample of 0.25 %."""
    stride = 401  # prime, so that it meets every row and column of a weight matrix
    sample = np.abs(x[(k * 7) % stride :: stride])
    expected = len(sample) * k / len(x)
    rank = math.ceil(expected + 3 * math.sqrt(expected)) + 1  # three standard deviations low
    if rank >= len(sample):
        return exact(np.abs(x), k)
    candidates = not_below(x, np.partition(sample, len(sample) - rank)[len(sample) - rank])
    if not k <= len(candidates) <= len(x) // 4:
        return exact(np.abs(x), k)
    return candidates[exact(np.abs(x[candidates]), k)]


def not_below(x: np.ndarray, threshold: np.floating) -> np.ndarray:
    """Ascending indices where |x| ≥ threshold, computed in chunks that stay in the cache."""
    magnitude, passes = np.empty(CHUNK, x.dtype), np.empty(CHUNK, bool)
    found = []
    for begin in range(0, len(x), CHUNK):
        piece = x[begin : begin + CHUNK]
        np.abs(piece, out=magnitude[: len(piece)])
        np.greater_equal(magnitude[: len(piece)], threshold, out=passes[: len(piece)])
        found.append(np.flatnonzero(passes[: len(piece)]) + begin)
    return np.concatenate(found)


def exact(magnitude: np.ndarray, k: int) -> np.ndarray:
    """Ascending indices of the k largest of `magnitude` (1-D, not negative, no NaN).

    Ties at the threshold are taken at even distances, so that no part of a tensor is favoured.
    """
    if k >= len(magnitude):
        return np.arange(len(magnitude))
    threshold = np.partition(magnitude, len(magnitude) - k)[len(magnitude) - k]
    above = np.flatnonzero(magnitude > threshold)
    ties = np.flatnonzero(magnitude == threshold)
    missing = k - len(above)
    chosen = ties[np.arange(missing) * len(ties) // missing]
    if len(chosen) == 1:  # nearly always
        return np.insert(above, np.searchsorted(above, chosen), chosen)
    return np.sort(np.concatenate([above, chosen]))
