"""Trainer(gradient_clip_val): local clipping before the accumulation, where the momentum is corrected.

Lightning clips gradients after the average. What a sparse average holds has left the residual by then, and what is
cut off would be lost. DGC clips each rank's gradient before (Lin et al. 2018, §3.2).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_gradcomp.compressors import Compressor, LossyCompressor


def clips(trainer: Trainer) -> bool:
    """Whether the Trainer clips gradients."""
    return trainer.gradient_clip_val is not None and trainer.gradient_clip_val > 0  # as Lightning reads it


class LocalClipping:
    """For the length of a fit: the Trainer's threshold, in the compressor instead of the Trainer."""

    def __init__(self) -> None:
        self._taken: tuple[Trainer, float] | None = None

    def take_over(
        self, compressor: Compressor, optimizer: torch.optim.Optimizer | None, trainer: Trainer
    ) -> Compressor:
        """The compressor to train with. The Trainer no longer clips where this one does."""
        clip_norm = trainer.gradient_clip_val
        if not clips(trainer) or not isinstance(compressor, LossyCompressor):
            return compressor
        if not compressor.state_for(optimizer).owns_momentum:
            rank_zero_info(f"gradient_clip_val={clip_norm} clips the average that was sent: what it cuts off is gone.")
            return compressor
        rank_zero_info(f"gradient_clip_val={clip_norm} clips each rank's gradient before it is accumulated.")
        assert clip_norm is not None
        self._taken = trainer, clip_norm
        trainer.gradient_clip_val = None
        return replace(compressor, clip_norm=float(clip_norm))

    def restore_trainer(self) -> None:
        """Leave the Trainer as the user made it."""
        if self._taken is not None:
            trainer, trainer.gradient_clip_val = self._taken
            self._taken = None
