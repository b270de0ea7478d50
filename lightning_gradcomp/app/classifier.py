"""Image classification as a LightningModule; nothing in it knows about compression."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import nn

from lightning_gradcomp.app.data.shared import SharedImages
from lightning_gradcomp.app.options.training import Optimizer
from lightning_gradcomp.app.schedule import build

Batch = list[torch.Tensor]
"""Images (batch, channels, height, width) and labels int64 (batch)."""

Mix = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Classifier(L.LightningModule):
    """Cross entropy; the accuracy counts each validation image of all ranks once.

    Args:
        model: images -> logits.
        optimizer: its options.
        mix: what happens to a batch before the forward pass: (images, labels) -> (images, labels or shares of them).
        label_smoothing: of the training loss.
    """

    correct: int = 0
    """Validation images that the model had right at the last validation, over all ranks."""
    images: int = 0
    """Validation images that it was shown then."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, mix: Mix | None = None, label_smoothing: float = 0.0
    ) -> None:
        super().__init__()
        self.model = model
        self.options, self.mix, self.label_smoothing = optimizer, mix, label_smoothing

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        images, labels = self.mix(*batch) if self.mix else batch
        loss = nn.functional.cross_entropy(self.model(images), labels, label_smoothing=self.label_smoothing)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        # DDP copies rank 0's batch-norm statistics before a forward pass, so they differ after the last one. Rank 0's
        # are the ones that a checkpoint holds, so the accuracy is theirs.
        for buffer in self.buffers():
            dist.broadcast(buffer, src=0)
        self.counts = torch.zeros(3, dtype=torch.float64, device=self.device)  # right, seen, sum of the losses

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        logits = self.model(images)
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        right = (logits.argmax(1) == labels).sum()
        self.counts += torch.stack([right, torch.tensor(len(labels), device=self.device), loss]).double()

    def on_validation_epoch_end(self) -> None:
        dist.all_reduce(self.counts)
        right, seen, loss = self.counts.tolist()
        self.correct, self.images = int(right), int(seen)
        # Equal on all ranks already. Lightning wants them synchronised, and the maximum of equal numbers is exact.
        self.log_dict(
            {"val_acc": right / seen, "val_loss": loss / seen}, prog_bar=True, sync_dist=True, reduce_fx="max"
        )

    def configure_optimizers(self) -> Any:
        data = self.trainer.datamodule  # pyrefly: ignore[missing-attribute] - the Trainer's, of Lightning's connector
        assert isinstance(data, SharedImages)
        optimizer, schedule = build(self.options, self, data.optimizer_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
