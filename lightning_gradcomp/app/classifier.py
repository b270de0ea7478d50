"""Image classification."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from lightning_gradcomp.app.data.augment import Augment
from lightning_gradcomp.app.data.images import SharedImages
from lightning_gradcomp.app.scheduler import WarmupCosine
from lightning_gradcomp.app.task import Task

Batch = list[torch.Tensor]
"""Images (batch, channels, height, width) and labels int64 (batch)."""


class Classifier(Task):
    """Cross entropy of images. The accuracy counts each validation image once over all ranks."""

    data, monitor, mode = SharedImages, "val_acc", "max"

    def __init__(
        self,
        model: nn.Module,
        data: SharedImages,
        optimizer: partial[torch.optim.Optimizer],
        scheduler: WarmupCosine,
        augment: Augment = Augment(),  # noqa: B008 - frozen
        decay_all: bool = True,
        channels_last: bool = False,
        compile: bool = False,
        weights: str | None = None,
        frozen: Sequence[str] | None = None,
    ) -> None:
        model = model.to(memory_format=torch.channels_last) if channels_last else model
        super().__init__(model, optimizer, scheduler, decay_all, compile, weights, frozen)
        self.mix, self.label_smoothing = augment.mixer(data.classes), augment.label_smoothing
        self.channels_last = channels_last

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images.to(memory_format=torch.channels_last) if self.channels_last else images)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        images, labels = self.mix(*batch) if self.mix else batch
        loss = nn.functional.cross_entropy(self(images), labels, label_smoothing=self.label_smoothing)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def count(self, batch: Batch) -> torch.Tensor:
        """Correctly classified images, images, sum of the losses."""
        images, labels = batch
        logits = self(images)
        losses = nn.functional.cross_entropy(logits.float(), labels, reduction="none").double()
        correct = (logits.argmax(1) == labels).double()
        return torch.stack([correct.sum(), torch.ones_like(correct).sum(), losses.sum()])

    def metrics(self) -> dict[str, float]:
        correct, images, loss = self.counts
        return {"val_acc": correct / images, "val_loss": loss / images}

    def result(self) -> dict[str, float]:
        correct, images, _ = self.counts
        return {"val_acc": correct / images, "val_correct": int(correct), "val_images": int(images)}

    def words(self) -> tuple[str, str]:
        correct, images, _ = self.counts
        return "validation accuracy", f"{correct / images:.2%} ({correct:.0f} of {images:.0f} images)"
