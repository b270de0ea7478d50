"""Image classification as a LightningModule, with torch's optimizers, a linear warm-up and a cosine schedule.

It is independent of compression.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import nn

from lightning_gradcomp.app.data.shared import SharedImages
from lightning_gradcomp.app.data.transforms import Mix
from lightning_gradcomp.app.options.training import SGD, Optimizer

Batch = list[torch.Tensor]
"""Images (batch, channels, height, width) and labels int64 (batch)."""


class Classifier(L.LightningModule):
    """Cross entropy; the accuracy counts each validation image of all ranks once.

    Args:
        model: images -> logits.
        optimizer: its options.
        mix: applied to a training batch before the forward pass: MixUp or CutMix.
        label_smoothing: of the training loss.
        channels_last: memory format of the images.
    """

    correct: int = 0
    """Validation images that were classified correctly at the last validation, over all ranks."""
    images: int = 0
    """Validation images of the last validation, over all ranks."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        mix: Mix | None = None,
        label_smoothing: float = 0.0,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.options, self.mix, self.label_smoothing = optimizer, mix, label_smoothing
        self.channels_last = channels_last

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images.to(memory_format=torch.channels_last) if self.channels_last else images)

    def loss(self, batch: Batch) -> torch.Tensor:
        """The mean over a training batch."""
        images, labels = self.mix(*batch) if self.mix else batch
        return nn.functional.cross_entropy(self(images), labels, label_smoothing=self.label_smoothing)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        # DDP copies rank 0's batch-norm statistics before a forward pass, so they differ after the last one; with FSDP2
        # they are each rank's own. Rank 0's are the ones that a checkpoint holds, so the accuracy is theirs.
        for buffer in self.buffers():
            dist.broadcast(buffer, src=0)
        self.counts = torch.zeros(3, dtype=torch.float64, device=self.device)  # correct, images, sum of the losses

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        correct = (logits.argmax(1) == labels).sum()
        self.counts += torch.stack([correct, torch.tensor(len(labels), device=self.device), loss]).double()

    def on_validation_epoch_end(self) -> None:
        dist.all_reduce(self.counts)
        correct, images, loss = self.counts.tolist()
        self.correct, self.images = int(correct), int(images)
        # Equal on all ranks already. Lightning wants them synchronised, and the maximum of equal numbers is exact.
        self.log_dict(
            {"val_acc": correct / images, "val_loss": loss / images}, prog_bar=True, sync_dist=True, reduce_fx="max"
        )

    def configure_optimizers(self) -> Any:
        data = self.trainer.datamodule  # pyrefly: ignore[missing-attribute] - the Trainer's, of Lightning's connector
        assert isinstance(data, SharedImages)
        images = data.batch_size * self.trainer.accumulate_grad_batches
        peak, warmup = self.options.peak(images), self.options.warmup(data.epoch_steps)
        options = self.options
        if self.trainer.precision == "16-mixed":  # Lightning would not clip then
            options = replace(options, fused=False)
        optimizer, schedule = build_optimizer(options, self, peak, warmup, data.optimizer_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


POSITIONS = "relative_position_bias_table"
"""Of Swin's attention: two-dimensional, but no weight of a linear layer."""


def warmup_cosine(step: int, warmup_steps: int, total_steps: int, end: float = 0.0) -> float:
    """The factor of the peak learning rate at `step` (from 0): up to 1 in `warmup_steps`, then a cosine to `end`.

    >>> [round(warmup_cosine(step, 2, 6), 3) for step in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    cosine = (1 + math.cos(math.pi * (step - warmup_steps) / max(1, total_steps - warmup_steps))) / 2
    return end + (1 - end) * cosine


def parameter_groups(options: Optimizer, module: torch.nn.Module) -> list[dict[str, Any]]:
    """The parameters of `module` as groups of an optimizer: with weight decay, and without."""
    decayed, without = [], []
    for name, parameter in module.named_parameters():
        decays = options.decay_all or (parameter.dim() > 1 and not name.endswith(POSITIONS))
        (decayed if decays else without).append(parameter)
    found = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": without, "weight_decay": 0.0}]
    return [group for group in found if group["params"]]


def build_optimizer(
    options: Optimizer, module: torch.nn.Module, peak: float, warmup_steps: int, total_steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """The optimizer that `options` describe, and its schedule over `total_steps` optimizer steps: up to `peak`."""
    if isinstance(options, SGD):
        rest = {"momentum": options.momentum, "nesterov": options.nesterov}
        optimizer = torch.optim.SGD(parameter_groups(options, module), lr=peak, fused=options.fused, **rest)
    else:
        optimizer = torch.optim.AdamW(parameter_groups(options, module), lr=peak, fused=options.fused)
    factor = lambda step: warmup_cosine(step, warmup_steps, total_steps, options.end)  # noqa: E731
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
