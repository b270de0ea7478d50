"""Lightning callbacks of every training run: reproducible random draws, and a checkpoint on SIGTERM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_gradcomp.compressors.kernels.rng import seed_of


class SeedEachStep(Callback):
    """Makes a step's random draws, such as MixUp's shares and dropped paths, a function of (seed, rank, epoch, batch).

    Ranks draw different numbers. A resumed run draws the same numbers as an uninterrupted one, without saved state.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(seed_of(self.seed, trainer.global_rank, trainer.current_epoch, batch_idx))


class SaveOnSigterm(Callback):
    """Writes a checkpoint when a SIGTERM ends the run, after a whole step and on all ranks together."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> Any:
        if isinstance(exception, SIGTERMException):
            trainer.save_checkpoint(self.path, weights_only=False)
