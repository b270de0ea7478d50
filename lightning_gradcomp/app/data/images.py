"""Images by class, for classifiers."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import TensorDataset

from lightning_gradcomp.app.data.augment import Augment
from lightning_gradcomp.app.data.federated import OwnImages, dirichlet_split
from lightning_gradcomp.app.data.shared import RankSampler, SharedData
from lightning_gradcomp.errors import is_number, refusal


class SharedImages(SharedData):
    """Images by class: `load` returns data sets of pairs, a float (channels, height, width) and an int label.

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
        from lightning_gradcomp.app.data.synthetic import Synthetic  # a subclass

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
