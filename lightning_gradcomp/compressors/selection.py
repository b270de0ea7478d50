"""The k largest entries of a tensor by magnitude, exactly k of them, whichever way they are found.

The DGC paper (Lin et al. 2018, §3.1 "hierarchical selection") samples 0.1-1 % of the tensor to guess a threshold, and
its authors' code then cuts the surplus in index order, which starves the end of every tensor. Here the sample gives a
threshold that is deliberately low: whatever passes it is few, and contains the k largest, which an exact search among
those few then finds. Where the guess was too high (fewer than k passed) the exact search runs on everything.
"""

from __future__ import annotations

import math

import numpy as np

from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.lazy import torch

SAMPLE_AT_LEAST = 65_536
"""Tensors shorter than this are searched exactly: a sample would cost as much."""


def count(n: int, density: float) -> int:
    """k = ceil(n · density), at least 1. Rounded first, since 1 - 0.999 is a little more than 0.001.

    >>> count(2_359_296, 1 - 0.999), count(1000, 1 - 0.999), count(5, 0.001)
    (2360, 1, 1)
    """
    return max(1, math.ceil(round(n * density, 6)))


def select_each(flat: torch.Tensor, layout: Layout, density: float) -> torch.Tensor:
    """Flat indices (int64, ascending) of the `count(size, density)` largest entries of each tensor of `layout`."""
    return torch.cat([select(flat[a:b], count(b - a, density)) + a for a, b in layout.bounds])


def count_each(layout: Layout, density: float) -> int:
    """How many indices `select_each` finds."""
    return sum(count(size, density) for size in layout.sizes)


def select(x: torch.Tensor, k: int) -> torch.Tensor:
    """Indices (int64, ascending) of the k entries of the 1-D float tensor `x` that are largest in magnitude."""
    if x.is_cuda:
        return torch.topk(x.abs(), k, sorted=False).indices.sort().values
    magnitude = np.abs(x.numpy())
    found = sampled(magnitude, k) if len(magnitude) >= SAMPLE_AT_LEAST else exact(magnitude, k)
    return torch.from_numpy(found)


def sampled(magnitude: np.ndarray, k: int) -> np.ndarray:
    """`exact`, searched only among the entries above a threshold that a strided sample of 1 % suggests."""
    stride = 101  # odd and prime, so that it meets every row and column of a weight matrix
    sample = magnitude[(k * 7) % stride :: stride]
    expected = len(sample) * k / len(magnitude)
    rank = math.ceil(expected + 3 * math.sqrt(expected)) + 1  # three standard deviations low
    if rank >= len(sample):
        return exact(magnitude, k)
    threshold = np.partition(sample, len(sample) - rank)[len(sample) - rank]
    candidates = np.flatnonzero(magnitude >= threshold)
    if not k <= len(candidates) <= len(magnitude) // 4:
        return exact(magnitude, k)
    return candidates[exact(magnitude[candidates], k)]


def exact(magnitude: np.ndarray, k: int) -> np.ndarray:
    """Ascending indices of the k largest of `magnitude` (1-D, not negative, no NaN).

    Equal values at the threshold are taken at even distances, so that no part of a tensor is favoured.
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
