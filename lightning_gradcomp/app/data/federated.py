"""Ranks without equal data: each has its own images, and of some classes many more than of others."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import Sampler

from lightning_gradcomp.errors import refusal

ATTEMPTS = 1000
"""Draws after which a split that leaves a rank without a batch is given up."""


def dirichlet_split(labels: torch.Tensor, ranks: int, alpha: float, least: int, seed: int) -> list[np.ndarray]:
    """The images of each rank: of every class, shares that are drawn from a Dirichlet distribution.

    The smaller `alpha`, the more unequal. Drawn again until every rank has `least` images, as is usual (Yurochkin et
    al. 2019, arXiv 1905.12022; Li et al. 2022, arXiv 2102.02079).

    Args:
        labels: int64 [n].
        ranks: their number.
        alpha: concentration, the same for all ranks, above 0.
        least: images that each rank must have.
        seed: of the draws.

    Returns:
        For each rank ascending indices, int64. Every image is in one of them.

    Raises:
        ValueError: no draw of many has given every rank `least` images.
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
    raise refusal("data.dirichlet", alpha, f"a larger number: a rank would have less than a batch of {least} images")


def _cuts(shares: np.ndarray, images: int) -> np.ndarray:
    return np.round(np.cumsum(shares)[:-1] * images).astype(int)


class OwnImages(Sampler[int]):
    """A rank's own images, in another order every epoch: as many indices as asked for, whatever it has.

    Where it has fewer it begins again; where it has more, an epoch has a part of them.

    Args:
        own: its images.
        length: indices of an epoch.
        seed: of the orders.
        skip: indices that the next epoch lacks at its begin.
    """

    def __init__(self, own: np.ndarray, length: int, *, seed: int, skip: int) -> None:
        self.own, self.length, self.seed, self.skip, self.epoch = own, length, seed, skip, 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose order comes next."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        random = np.random.default_rng((self.seed, self.epoch))
        rounds = -(-self.length // len(self.own))
        order = np.concatenate([random.permutation(self.own) for _ in range(rounds)])[: self.length]
        skip, self.skip = self.skip, 0
        return iter(order[skip:].tolist())
