"""Ranks with unequal data: each has its own images, with many more of some classes than of others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import Sampler

from lightning_gradcomp.errors import refusal

ATTEMPTS = 1000
"""Number of draws that may leave a rank without a batch before the split fails."""


def dirichlet_split(labels: torch.Tensor, ranks: int, alpha: float, least: int, seed: int) -> list[np.ndarray]:
    """Divide the images of every class among the ranks, in shares drawn from a Dirichlet distribution.

    The smaller `alpha`, the more unequal. Draws are repeated until every rank has `least` images, as is usual
    (Yurochkin et al. 2019, arXiv 1905.12022; Li et al. 2022, arXiv 2102.02079).

    Returns:
        Ascending indices for each rank, int64. Every image, of which `labels` is int64 [n], belongs to exactly one
        rank.
    """
    random = np.random.default_rng(seed)
    for _ in range(ATTEMPTS):
        parts: list[list[np.ndarray]] = [[] for _ in range(ranks)]
        for label in labels.unique().tolist():
            images = random.permutation(torch.nonzero(labels == label).view(-1).numpy())
            shares = random.dirichlet(np.full(ranks, alpha))
            for part, own in zip(parts, np.split(images, _cuts(shares, len(images))), strict=True):
                part.append(own)
        split = [np.sort(np.concatenate(part)) for part in parts]
        if min(map(len, split)) >= least:
            return split
    raise refusal("data.dirichlet", alpha, f"a larger number: a rank would have fewer than {least} images, one batch")


def _cuts(shares: np.ndarray, images: int) -> np.ndarray:
    return np.round(np.cumsum(shares)[:-1] * images).astype(int)


class OwnImages(Sampler[int]):
    """A rank's own images, in a new order every epoch, with `length` indices per epoch.

    A rank with fewer images repeats them; one with more uses some of them in each epoch. The next epoch skips its first
    `skip` indices.
    """

    def __init__(self, own: np.ndarray, length: int, *, seed: int, skip: int) -> None:
        self.own, self.length, self.seed, self.skip, self.epoch = own, length, seed, skip, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, and so the order of the images."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        random = np.random.default_rng((self.seed, self.epoch))
        rounds = -(-self.length // len(self.own))
        order = np.concatenate([random.permutation(self.own) for _ in range(rounds)])[: self.length]
        skip, self.skip = self.skip, 0
        return iter(order[skip:].tolist())
