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
from lightning_gradcomp.errors import refusal


class RankSampler(DistributedSampler[int]):
    """A rank's images of an epoch, in another order every epoch; the next epoch lacks its first `skip` images."""

    def __init__(self, images: Dataset[Any], ranks: int, rank: int, *, seed: int, skip: int) -> None:
        super().__init__(images, ranks, rank, seed=seed, drop_last=True)
        self.skip = skip

    def __iter__(self) -> Iterator[int]:
        order = list(super().__iter__())
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

    def __init__(self, source: Source, *, batch_size: int, ranks: int, seed: int) -> None:
        super().__init__()
        self.prepare_data_per_node = False  # nodes may share a disk, which two must not write to at once
        self.source, self.batch_size, self.ranks, self.seed = source, batch_size, ranks, seed
        self._check(source.images or batch_size)
        self.rank_batch = batch_size // ranks

    def _check(self, images: int) -> None:
        least = 2 * self.ranks  # batch norm needs two images
        if self.batch_size % self.ranks or not least <= self.batch_size <= images:
            allowed = f"a multiple of {self.ranks} (ranks), {least} to {images}"
            raise refusal("data.batch_size", self.batch_size, allowed)

    def prepare_data(self) -> None:
        """Runs on rank 0 alone, while the others wait."""
        self.source.prepare()

    def setup(self, stage: str) -> None:
        """Runs on every rank."""
        self.train, self.val = self.source.load()
        self._check(len(self.train))  # pyrefly: ignore[bad-argument-type] - every data set here has a length
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
        sampler: RankSampler | OwnImages = RankSampler(self.train, ranks, rank, seed=self.seed, skip=skip)
        if self.source.dirichlet is not None:
            length = len(self.train) // self.batch_size * self.rank_batch  # pyrefly: ignore[bad-argument-type]
            sampler = OwnImages(self.own[rank], length, seed=self.seed, skip=skip)
        sampler.set_epoch(self.trainer.current_epoch)  # Lightning does it too late for workers that prefetch
        return self._loader(self.train, batch_size=self.rank_batch, sampler=sampler, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Every N-th image, without the copies that a DistributedSampler adds to make ranks equal."""
        rank, ranks = self._rank_and_world()
        indices = range(rank, len(self.val), ranks)  # pyrefly: ignore[bad-argument-type]
        return self._loader(self.val, batch_size=128, sampler=indices)

    def _loader(self, images: Dataset[Any], **options: Any) -> DataLoader[Any]:
        workers = self.source.workers
        return DataLoader(
            images,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(self.seed),  # not the default, which a checkpoint restores
            **options,
        )

    def _rank_and_world(self) -> tuple[int, int]:
        assert self.trainer is not None  # Lightning sets it before it calls for a loader
        return self.trainer.global_rank, self.trainer.world_size
