"""A data set distributed over the ranks: shuffled and even for training, every example exactly once for validation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_gradcomp.compressors.kernels.rng import seed_of
from lightning_gradcomp.errors import Refused, check_whole, refusal

MEANWHILE = "Meanwhile, gradcomp recipe=digits needs none, and dry_run=true checks everything but the data"


class MissingData(Refused):
    """Files that are missing or can't be used."""


class RankSampler(DistributedSampler[int]):
    """A rank's examples of an epoch, in a new order every epoch. The next epoch skips its first `skip` examples.

    With `repeats` above 1, each example occurs that often in a row among those of all ranks together, and the epoch
    has the same length as without: repeated augmentation (Touvron et al. 2021, arXiv 2012.12877).
    """

    def __init__(self, examples: Dataset[Any], ranks: int, rank: int, *, seed: int, skip: int, repeats: int = 1):
        super().__init__(examples, ranks, rank, seed=seed, drop_last=True)
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
"""Training and validation examples."""


class SharedData(L.LightningDataModule, ABC):
    """Examples of any kind, `batch_size` per training step over all ranks together, before accumulation.

    Subclasses define which. Options: conf/data.
    """

    name: str | None
    root: Path
    """The folder of the files, if there are any."""
    where: ClassVar[str] = "data.dir"
    """The option that sets it."""
    how_to_get: ClassVar[str]
    """What to do if files are missing: a sentence without its full stop."""
    examples: ClassVar[str]
    """What an example is, in messages: images or windows."""
    least_per_rank: ClassVar[int] = 1
    """Smallest part of a batch that a rank can train on."""
    train: Dataset[Any]
    val: Dataset[Any]

    def __init__(self, batch_size: int, seed: int = 0, workers: int = 0, prefetch: int = 2) -> None:
        super().__init__()
        self.prepare_data_per_node = False  # nodes may share a disk; two must not write to it at once
        for option, got, least in (("batch_size", batch_size, 1), ("workers", workers, 0), ("prefetch", prefetch, 1)):
            check_whole(f"data.{option}", got, least)
        self.batch_size, self.seed, self.workers, self.prefetch = batch_size, seed, workers, prefetch

    @abstractmethod
    def load(self) -> Pair:
        """Read the examples or find their files, on every rank."""

    @property
    @abstractmethod
    def model_options(self) -> dict[str, Any]:
        """The arguments with which conf/model/*.yaml build a network for these examples."""

    @abstractmethod
    def stand_in(self, batch_size: int) -> SharedData:
        """Random examples of the same shape: two batches to train on and one to validate, without any file."""

    @property
    @abstractmethod
    def validation_batch(self) -> int:
        """Maximum number of examples in a rank's validation batch."""

    def sampler(self, rank: int, ranks: int, skip: int) -> Any:
        """The order of a rank's training examples, without the first `skip` of the next epoch."""
        return RankSampler(self.train, ranks, rank, seed=self.seed, skip=skip)

    def missing(self, why: str) -> MissingData:
        """The error for files that can't be used: why, where they were looked for, how to get them."""
        looked = f"Looked in {self.root.resolve()} ({self.where})"
        return MissingData(f"{self.name}: {why}. {looked}. {self.how_to_get}. {MEANWHILE}.")

    def check(self) -> None:
        """Raises ValueError if files are missing, before any rank starts."""

    def check_batch(self, ranks: int, examples: int | None = None) -> None:
        """Raises ValueError if `ranks` can't share the batch, or `examples` don't fill it."""
        least = self.least_per_rank * ranks
        if self.batch_size % ranks or not least <= self.batch_size <= (examples or self.batch_size):
            most = f"{least} to {examples}" if examples else f"{least} or more"
            raise refusal("data.batch_size", self.batch_size, f"a multiple of {ranks} (ranks), {most}")

    def setup(self, stage: str) -> None:
        """Runs on every rank."""
        assert self.trainer is not None
        ranks = self.trainer.world_size
        self.train, self.val = self.load()
        self.check_batch(ranks, len(self.train))  # pyrefly: ignore[bad-argument-type] - every data set here has one
        self.rank_batch = self.batch_size // ranks
        if (examples := len(self.val)) < ranks:  # pyrefly: ignore[bad-argument-type]
            raise refusal(f"{self.examples} to validate with", examples, f"one for each of {ranks} ranks")

    @property
    def epoch_steps(self) -> int:
        """Optimizer steps per epoch. Lightning's `estimated_stepping_batches` would build the loader before the
        checkpoint's position is known."""
        assert self.trainer is not None
        batches = len(self.train) // self.batch_size  # pyrefly: ignore[bad-argument-type]
        limit = self.trainer.limit_train_batches  # a share with overfit_batches=0.1, or 1.0
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        return math.ceil(batches / self.trainer.accumulate_grad_batches)

    def train_dataloader(self) -> DataLoader[Any]:
        """The training loader. It drops an epoch's last examples, which don't fill a batch on every rank."""
        rank, ranks = self._rank_and_world()
        assert self.trainer is not None
        # After a mid-epoch checkpoint, Lightning continues to count batches but doesn't skip the earlier ones.
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress
        done = 0 if progress.is_last_batch else progress.current.processed
        sampler = self.sampler(rank, ranks, done * self.rank_batch)
        sampler.set_epoch(self.trainer.current_epoch)  # Lightning does it too late for workers that prefetch
        return self._loader(self.train, batch_size=self.rank_batch, sampler=sampler, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Every N-th example, without the copies that a DistributedSampler adds to make ranks equal.

        All ranks have the same number of batches, some one example smaller: a forward pass with shards is a collective.
        """
        rank, ranks = self._rank_and_world()
        examples = len(self.val)  # pyrefly: ignore[bad-argument-type]
        own, batches = range(rank, examples, ranks), math.ceil(examples / ranks / self.validation_batch)
        return self._loader(self.val, batch_sampler=[own[batch::batches] for batch in range(batches)])

    def _loader(self, examples: Dataset[Any], **options: Any) -> DataLoader[Any]:
        workers, (rank, _) = self.workers, self._rank_and_world()
        return DataLoader(
            examples,
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
