"""Trainer(gradient_clip_val): local clipping before the accumulation, where a compressor owns the momentum.

Lightning clips gradients after the average. What a sparse average holds has left the memory by then, and whatever is
cut off it would be lost. DGC clips each rank's gradient before (Lin et al. 2018, §3.2).
"""

from __future__ import annotations

from dataclasses import replace

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_gradcomp.compressors import Compressor, Lossy
from lightning_gradcomp.errors import refusal


def check_clipping(compressor: Compressor, trainer: Trainer, module: LightningModule) -> None:
    """Refuse clipping that a compressor which owns the momentum can't do locally, before the accumulation.

    Raises:
        ValueError: clipping by value, in a hook of the user's, or with a second threshold.
    """
    if not compressor.owns_momentum:
        return
    name = type(compressor).__name__
    if is_overridden("configure_gradient_clipping", module):
        allowed = f"{name}(clip_norm=...): the hook would clip what is sent, which has left the memory already"
        raise refusal(f"configure_gradient_clipping with {name}", "a hook of the module", allowed)
    if not _clips(trainer):
        return
    if not hasattr(compressor, "clip_norm"):
        raise refusal(f"Trainer(gradient_clip_val) with {name}", trainer.gradient_clip_val, "None")
    if trainer.gradient_clip_algorithm == "value":
        raise refusal(f"Trainer(gradient_clip_algorithm) with {name}", "value", "norm, which is applied locally")
    if compressor.clip_norm is not None:  # type: ignore[attr-defined]
        allowed = f"one of {name}(clip_norm=...) and Trainer(gradient_clip_val=...), which mean the same here"
        raise refusal(f"{name}.clip_norm and Trainer(gradient_clip_val)", "both", allowed)


def _clips(trainer: Trainer) -> bool:
    return trainer.gradient_clip_val is not None and trainer.gradient_clip_val > 0  # as Lightning reads it


class LocalClipping:
    """For the length of a fit: the Trainer's threshold, in the compressor instead of the Trainer."""

    def __init__(self) -> None:
        self._taken: tuple[Trainer, float] | None = None

    def take_over(self, compressor: Compressor, trainer: Trainer) -> Compressor:
        """The compressor to train with. The Trainer no longer clips where this one does."""
        clip_norm = trainer.gradient_clip_val
        if not _clips(trainer) or not isinstance(compressor, Lossy):
            return compressor
        if not compressor.owns_momentum:
            rank_zero_info(f"gradient_clip_val={clip_norm} clips the average that was sent: what it cuts off is gone.")
            return compressor
        rank_zero_info(f"gradient_clip_val={clip_norm} clips each rank's gradient before it is accumulated.")
        assert clip_norm is not None
        self._taken = trainer, clip_norm
        trainer.gradient_clip_val = None
        return replace(compressor, clip_norm=float(clip_norm))  # type: ignore[call-arg]

    def give_back(self) -> None:
        """Leave the Trainer as the user made it."""
        if self._taken is not None:
            trainer, trainer.gradient_clip_val = self._taken
            self._taken = None
