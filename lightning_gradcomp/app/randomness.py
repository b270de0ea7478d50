"""Where the random numbers stood, in a checkpoint: dropped paths and mixed images go on as if nothing had been."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class RandomState(Callback):
    """torch's generators of rank 0, which are those of all ranks: one seed, and draws for as many steps.

    On a GPU, the generator of each rank's own device is set to rank 0's.
    """

    def __init__(self) -> None:
        self._saved: dict[str, torch.Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        """Of now."""
        cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {}
        return {"cpu": torch.get_rng_state(), **cuda}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep it until training begins: what is set up before draws too."""
        self._saved = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._saved:
            torch.set_rng_state(self._saved["cpu"].cpu())
        if "cuda" in self._saved and trainer.strategy.root_device.type == "cuda":
            torch.cuda.set_rng_state(self._saved["cuda"].cpu())
