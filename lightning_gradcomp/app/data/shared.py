"""How the ranks share a data set: shuffled and evenly to train; every image exactly once to validate."""

from __future__ import annotations

import lightning as L
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_gradcomp.errors import refusal


class SharedImages(L.LightningDataModule):
    """Images in memory, `batch_size` a training step over all `ranks` together.

    Raises:
        ValueError: a batch size that the ranks can't share.
    """

    def __init__(self, train: TensorDataset, val: TensorDataset, *, batch_size: int, ranks: int, seed: int) -> None:
        super().__init__()
        if batch_size % ranks or not 2 * ranks <= batch_size <= len(train):  # batch norm needs two
            raise refusal("data.batch_size", batch_size, f"a multiple of {ranks} (ranks), {2 * ranks} to {len(train)}")
        self.train, self.val, self.seed = train, val, seed
        self.rank_batch = batch_size // ranks

    def train_dataloader(self) -> DataLoader:
        """Another order every epoch; what doesn't fill a batch on every rank waits for the next."""
        rank, ranks = self._place()
        sampler = DistributedSampler(self.train, ranks, rank, seed=self.seed, drop_last=True)
        return DataLoader(self.train, self.rank_batch, sampler=sampler, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        """Every so-many-th image, without the copies that a DistributedSampler adds to make ranks equal."""
        rank, ranks = self._place()
        return DataLoader(self.val, batch_size=128, sampler=range(rank, len(self.val), ranks))

    def _place(self) -> tuple[int, int]:
        assert self.trainer is not None  # Lightning sets it before it asks for a loader
        return self.trainer.global_rank, self.trainer.world_size
