"""Images by class, for classifiers; and random ones, for throughput measurements and dry runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler, TensorDataset

from lightning_gradcomp.app.data.augment import Augment
from lightning_gradcomp.app.data.shared import Pair, RankSampler, SharedData
from lightning_gradcomp.errors import check_whole, is_number, refusal

DIFFERENT = 64
"""Number of distinct images; the others are copies of them, so that any number fits into memory."""

ATTEMPTS = 1000
"""Number of draws that may leave a rank without a batch before the split fails."""


def dirichlet_split(labels: torch.Tensor, ranks: int, alpha: float, least: int, seed: int) -> list[np.ndarray]:
    """Divide the images of every class among the ranks, in shares drawn from a Dirichlet distribution.

    The smaller `alpha`, the more unequal. Draws are repeated until every rank has `least` images, as is usual
    (Yurochkin et al. 2019, arXiv 1905.12022; Li et al. 2022, arXiv 2102.02079).

    `labels` is int64 [n]. Returns ascending indices for each rank, int64. Every image belongs to exactly one rank.
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


class SharedImages(SharedData):
    """Images by class: `load` returns data sets of pairs, a float (channels, height, width) and an int label.

    With `dirichlet`, each rank has its own images.
    """

    channels: int
    classes: int
    size: int
    """Height and width of an image in pixels."""
    own: list[np.ndarray]  # images of each rank, with `dirichlet`
    examples, least_per_rank, validation_batch = "images", 2, 128  # two: for batch norm

    def __init__(
        self,
        batch_size: int,
        augment: Augment = Augment(),  # noqa: B008 - frozen
        seed: int = 0,
        workers: int = 0,
        prefetch: int = 2,
        dirichlet: float | None = None,
    ) -> None:
        super().__init__(batch_size, seed, workers, prefetch)
        if dirichlet is not None and not (is_number(dirichlet) and dirichlet >= 0.01):
            raise refusal("data.dirichlet", dirichlet, "null, or 0.01 or more")
        self.augment, self.dirichlet = augment, dirichlet

    @property
    def model_options(self) -> dict[str, Any]:
        return {"channels": self.channels, "classes": self.classes, "size": self.size}

    def stand_in(self, batch_size: int) -> SharedData:
        return Synthetic(batch_size, images=2 * batch_size, seed=self.seed, **self.model_options)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit" and self.dirichlet is not None:
            assert self.trainer is not None and isinstance(self.train, TensorDataset)
            labels, ranks = self.train.tensors[1], self.trainer.world_size
            self.own = dirichlet_split(labels, ranks, self.dirichlet, self.rank_batch, self.seed)

    def sampler(self, rank: int, ranks: int, skip: int) -> RankSampler | OwnImages:
        if self.dirichlet is not None:
            length = len(self.train) // self.batch_size * self.rank_batch  # pyrefly: ignore[bad-argument-type]
            return OwnImages(self.own[rank], length, seed=self.seed, skip=skip)
        return RankSampler(self.train, ranks, rank, seed=self.seed, skip=skip, repeats=self.augment.repeats)


class Repeated(TensorDataset):
    """The same images repeated, `images` in total."""

    def __init__(self, images: int, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.images = images

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return super().__getitem__(index % DIFFERENT)

    def __len__(self) -> int:
        return self.images


class Synthetic(SharedImages):
    """Normally distributed pixels with random labels, the same on all ranks; one batch to validate with.

    `augment` does not transform the images.
    """

    name = "synthetic"

    def __init__(
        self,
        batch_size: int = 64,
        size: int = 224,
        classes: int = 1000,
        images: int = 1280,
        channels: int = 3,
        augment: Augment = Augment(),  # noqa: B008 - frozen
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, augment, seed)
        augment.check_in_memory("data=synthetic")
        for option, got, least in (("size", size, 8), ("classes", classes, 2), ("images", images, 1)):
            check_whole(f"data.{option}", got, least)
        self.size, self.classes, self.images, self.channels = size, classes, images, channels

    def load(self) -> Pair:
        generator = torch.Generator().manual_seed(0)
        shape = (DIFFERENT, self.channels, self.size, self.size)
        pixels = torch.randn(shape, generator=generator, dtype=torch.float32)
        labels = torch.randint(self.classes, (DIFFERENT,), generator=generator)
        return Repeated(self.images, pixels, labels), Repeated(self.batch_size, pixels, labels)
