"""A data set distributed over the ranks: shuffled and evenly to train; every image exactly once to validate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from lightning_gradcomp.app.data.federated import OwnImages, dirichlet_split
from lightning_gradcomp.app.data.source import Source
from lightning_gradcomp.app.options.data import check_batch
from lightning_gradcomp.compressors.kernels.rng import seed_of
from lightning_gradcomp.errors import refusal

MOST_IMAGES = 128
"""In a batch of a rank, to validate."""


class RankSampler(DistributedSampler[int]):
    """A rank's images of an epoch, in another order every epoch; the next epoch lacks its first `skip` images.

    With `repeats` above 1 each image is so many times in a row among the images of all ranks together, and the epoch
    ends after as many images as without: repeated augmentation (Touvron et al. 2021, arXiv 2012.12877).
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


class SharedImages(L.LightningDataModule):
    """The images of `source`, `batch_size` a training step over all `ranks` together.

    Raises:
        ValueError: a batch size that the ranks can't share, at once where the number of images is known, else in
            `setup`; in `setup` to fit, a Dirichlet split that leaves a rank without a batch.
    """

    train: Dataset[Any]
    val: Dataset[Any]
    own: list[np.ndarray]  # the images of each rank, where the source has a `dirichlet`

    def __init__(self, source: Source, *, batch_size: int, ranks: int, seed: int, repeats: int = 1) -> None:
        super().__init__()
        self.repeats = repeats
        self.prepare_data_per_node = False  # nodes may share a disk, which two must not write to at once
        self.source, self.batch_size, self.ranks, self.seed = source, batch_size, ranks, seed
        check_batch(batch_size, ranks, source.images)
        self.rank_batch = batch_size // ranks

    def prepare_data(self) -> None:
        """Runs on rank 0 alone, while the others wait."""
        self.source.prepare()

    def setup(self, stage: str) -> None:
        """Runs on every rank."""
        self.train, self.val = self.source.load()
        count = len(self.train)  # pyrefly: ignore[bad-argument-type] - every data set here has a length
        check_batch(self.batch_size, self.ranks, count)
        if (images := len(self.val)) < self.ranks:  # pyrefly: ignore[bad-argument-type]
            raise refusal("images to validate with", images, f"one for each of {self.ranks} ranks")
        if stage == "fit" and (alpha := self.source.dirichlet) is not None:
            assert isinstance(self.train, TensorDataset)
            self.own = dirichlet_split(self.train.tensors[1], self.ranks, alpha, self.rank_batch, self.seed)

    @property
    def epoch_steps(self) -> int:
        """Optimizer steps of an epoch. Lightning's `estimated_stepping_batches` would build the loader before the
        checkpoint's position is known."""
        assert self.trainer is not None
        batches = len(self.train) // self.batch_size  # pyrefly: ignore[bad-argument-type]
        if isinstance(limit := self.trainer.limit_train_batches, int):
            batches = min(batches, limit)
        return math.ceil(batches / self.trainer.accumulate_grad_batches)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run."""
        assert self.trainer is not None
        return self.epoch_steps * (self.trainer.max_epochs or 1)

    def train_dataloader(self) -> DataLoader[Any]:
        """Without the last images of an epoch, which don't fill a batch on every rank."""
        rank, ranks = self._rank_and_world()
        assert self.trainer is not None
        # After a checkpoint from amid an epoch Lightning goes on counting batches, but doesn't skip those before.
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress
        done = 0 if progress.is_last_batch else progress.current.processed
        skip = done * self.rank_batch
        sampler: RankSampler | OwnImages = RankSampler(
            self.train, ranks, rank, seed=self.seed, skip=skip, repeats=self.repeats
        )
        if self.source.dirichlet is not None:
            length = len(self.train) // self.batch_size * self.rank_batch  # pyrefly: ignore[bad-argument-type]
            sampler = OwnImages(self.own[rank], length, seed=self.seed, skip=skip)
        sampler.set_epoch(self.trainer.current_epoch)  # Lightning does it too late for workers that prefetch
        return self._loader(self.train, batch_size=self.rank_batch, sampler=sampler, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Every N-th image, without the copies that a DistributedSampler adds to make ranks equal.

        All ranks have as many batches, some of them an image smaller: a forward pass of shards is a collective.
        """
        rank, ranks = self._rank_and_world()
        images = len(self.val)  # pyrefly: ignore[bad-argument-type]
        own, batches = range(rank, images, ranks), math.ceil(images / ranks / MOST_IMAGES)
        return self._loader(self.val, batch_sampler=[own[batch::batches] for batch in range(batches)])

    def _loader(self, images: Dataset[Any], **options: Any) -> DataLoader[Any]:
        workers, (rank, _) = self.source.workers, self._rank_and_world()
        return DataLoader(
            images,
            num_workers=workers,
            persistent_workers=workers > 0,
            prefetch_factor=self.source.prefetch if workers else None,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(seed_of(self.seed, rank)),  # of the workers' augmentation
            **options,
        )

    def _rank_and_world(self) -> tuple[int, int]:
        assert self.trainer is not None  # Lightning sets it before it calls for a loader
        return self.trainer.global_rank, self.trainer.world_size
