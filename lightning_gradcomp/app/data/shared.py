"""A data set distributed over the ranks: shuffled and even for training, every image exactly once for validation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from lightning_gradcomp.app.data.augment import Augment
from lightning_gradcomp.app.data.federated import OwnImages, dirichlet_split
from lightning_gradcomp.compressors.kernels.rng import seed_of
from lightning_gradcomp.errors import refusal

MOST_IMAGES = 128
"""Maximum number of images in a rank's validation batch."""


class RankSampler(DistributedSampler[int]):
    """A rank's images of an epoch, in a new order every epoch. The next epoch skips its first `skip` images.

    With `repeats` above 1, each image occurs that often in a row among the images of all ranks together, and the epoch
    has the same length as without: repeated augmentation (Touvron et al. 2021, arXiv 2012.12877).
    """

    def __init__(self, images: Dataset[Any], ranks: int, rank: int, *, seed: int, skip: int, repeats: int = 1) -> None:
        super().__init__(images, ranks, rank, seed=seed, drop_last=True)
        self.skip, self.repeats = skip, repeats

    def __iter__(self) -> Iterator[int]:
        order = list(super().__iter__())
        if self.repeats > 1:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            shuffled = torch.randperm(len(self.dataset), generator=generator)  # pyrefly: ignore[bad-argument-type]
            positions = self.rank + self.num_replicas * torch.arange(len(order))
            order = shuffled[positions // self.repeats].tolist()
        skip, self.skip = self.skip, 0
        return iter(order[skip:])


Pair = tuple[Dataset[Any], Dataset[Any]]
"""Training and validation images: each a float (channels, height, width) and an int label."""


class SharedImages(L.LightningDataModule):
    """Images by class, `batch_size` per training step over all ranks together. Subclasses define which.

    Args:
        batch_size: images per step, over all ranks together, before accumulation.
        augment: augmentation of the training images.
        seed: seed for the order of the images.
        workers: decoding processes per rank.
        prefetch: batches that each of them decodes ahead.
        dirichlet: concentration; each rank has its own images, the smaller, the more unequal. None: all share all
            images.

    Raises:
        ValueError: if an option is out of range; in `setup`, if the ranks can't share the batch size, or a Dirichlet
            split leaves a rank without a batch.
    """

    name: str | None
    channels: int
    classes: int
    size: int
    """Height and width of an image in pixels."""
    train: Dataset[Any]
    val: Dataset[Any]
    own: list[np.ndarray]  # images of each rank, with `dirichlet`

    def __init__(
        self,
        batch_size: int,
        augment: Augment = Augment(),  # noqa: B008 - frozen
        seed: int = 0,
        workers: int = 0,
        prefetch: int = 2,
        dirichlet: float | None = None,
    ) -> None:
        super().__init__()
        self.prepare_data_per_node = False  # nodes may share a disk; two must not write to it at once
        for option, got, least in (("batch_size", batch_size, 1), ("workers", workers, 0), ("prefetch", prefetch, 1)):
            if type(got) is not int or got < least:
                raise refusal(f"data.{option}", got, f"a whole number from {least}")
        if dirichlet is not None and not dirichlet >= 0.01:
            raise refusal("data.dirichlet", dirichlet, "null, or 0.01 or more")
        self.batch_size, self.augment, self.seed = batch_size, augment, seed
        self.workers, self.prefetch, self.dirichlet = workers, prefetch, dirichlet

    def load(self) -> Pair:
        """Read the images or find their files, on every rank."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises ValueError if files are missing, before any rank starts."""

    def check_batch(self, ranks: int, images: int | None = None) -> None:
        """Raises ValueError if `ranks` can't share the batch, or `images` don't fill it."""
        least = 2 * ranks  # batch norm needs two images
        if self.batch_size % ranks or not least <= self.batch_size <= (images or self.batch_size):
            most = f"{least} to {images}" if images else f"{least} or more"
            raise refusal("data.batch_size", self.batch_size, f"a multiple of {ranks} (ranks), {most}")

    def setup(self, stage: str) -> None:
        """Runs on every rank."""
        assert self.trainer is not None
        ranks = self.trainer.world_size
        self.train, self.val = self.load()
        self.check_batch(ranks, len(self.train))  # pyrefly: ignore[bad-argument-type] - every data set here has one
        self.rank_batch = self.batch_size // ranks
        if (images := len(self.val)) < ranks:  # pyrefly: ignore[bad-argument-type]
            raise refusal("images to validate with", images, f"one for each of {ranks} ranks")
        if stage == "fit" and self.dirichlet is not None:
            assert isinstance(self.train, TensorDataset)
            self.own = dirichlet_split(self.train.tensors[1], ranks, self.dirichlet, self.rank_batch, self.seed)

    @property
    def epoch_steps(self) -> int:
        """Optimizer steps per epoch. Lightning's `estimated_stepping_batches` would build the loader before the
        checkpoint's position is known."""
        assert self.trainer is not None
        batches = len(self.train) // self.batch_size  # pyrefly: ignore[bad-argument-type]
        if isinstance(limit := self.trainer.limit_train_batches, int):
            batches = min(batches, limit)
        return math.ceil(batches / self.trainer.accumulate_grad_batches)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps in the whole run."""
        assert self.trainer is not None
        return self.epoch_steps * (self.trainer.max_epochs or 1)

    def train_dataloader(self) -> DataLoader[Any]:
        """The training loader. It drops an epoch's last images, which don't fill a batch on every rank."""
        rank, ranks = self._rank_and_world()
        assert self.trainer is not None
        # After a mid-epoch checkpoint, Lightning continues to count batches but doesn't skip the earlier ones.
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress
        done = 0 if progress.is_last_batch else progress.current.processed
        skip = done * self.rank_batch
        sampler: RankSampler | OwnImages = RankSampler(
            self.train, ranks, rank, seed=self.seed, skip=skip, repeats=self.augment.repeats
        )
        if self.dirichlet is not None:
            length = len(self.train) // self.batch_size * self.rank_batch  # pyrefly: ignore[bad-argument-type]
            sampler = OwnImages(self.own[rank], length, seed=self.seed, skip=skip)
        sampler.set_epoch(self.trainer.current_epoch)  # Lightning does it too late for workers that prefetch
        return self._loader(self.train, batch_size=self.rank_batch, sampler=sampler, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Every N-th image, without the copies that a DistributedSampler adds to make ranks equal.

        All ranks have the same number of batches, some one image smaller: a forward pass with shards is a collective.
        """
        rank, ranks = self._rank_and_world()
        images = len(self.val)  # pyrefly: ignore[bad-argument-type]
        own, batches = range(rank, images, ranks), math.ceil(images / ranks / MOST_IMAGES)
        return self._loader(self.val, batch_sampler=[own[batch::batches] for batch in range(batches)])

    def _loader(self, images: Dataset[Any], **options: Any) -> DataLoader[Any]:
        workers, (rank, _) = self.workers, self._rank_and_world()
        return DataLoader(
            images,
            num_workers=workers,
            persistent_workers=workers > 0,
            prefetch_factor=self.prefetch if workers else None,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(seed_of(self.seed, rank)),  # for the workers' augmentation
            **options,
        )

    def _rank_and_world(self) -> tuple[int, int]:
        assert self.trainer is not None  # Lightning sets it before it calls for a loader
        return self.trainer.global_rank, self.trainer.world_size
