"""Image classification as a LightningModule, independent of compression."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_gradcomp.app.data.augment import Augment
from lightning_gradcomp.app.data.shared import SharedImages
from lightning_gradcomp.app.muon import MuonAdamW, with_rules
from lightning_gradcomp.app.scheduler import WarmupCosine
from lightning_gradcomp.app.sharding import blocks

Batch = list[torch.Tensor]
"""Images (batch, channels, height, width) and labels int64 (batch)."""

POSITIONS = "relative_position_bias_table"
"""A parameter of Swin's attention: two-dimensional, but not the weight of a linear layer."""


class Classifier(L.LightningModule):
    """Cross entropy. The accuracy counts each validation image once over all ranks.

    Args:
        model: images -> logits.
        classes: number of classes.
        optimizer: makes a torch optimizer from parameter groups.
        scheduler: schedule of its learning rate.
        augment: MixUp, CutMix and label smoothing of training batches.
        decay_all: False: no weight decay for biases, norm weights and Swin's position biases.
        channels_last: use this memory format for images and weights.
        compile: apply torch.compile to the network, or to each block if it is sharded.
    """

    correct: int = 0
    """Images that the last validation classified correctly, over all ranks."""
    images: int = 0
    """Images in the last validation, over all ranks."""

    def __init__(
        self,
        model: nn.Module,
        classes: int,
        optimizer: partial[torch.optim.Optimizer],
        scheduler: WarmupCosine,
        augment: Augment = Augment(),  # noqa: B008 - frozen
        decay_all: bool = True,
        channels_last: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.model = model.to(memory_format=torch.channels_last) if channels_last else model
        self.optimizer, self.scheduler, self.decay_all = optimizer, scheduler, decay_all
        self.mix, self.label_smoothing = augment.mixer(classes), augment.label_smoothing
        self.channels_last, self.compiled = channels_last, compile

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        if mesh is None:
            if self.compiled and self.trainer.state.fn == "fit":
                self.model.compile()
            return
        if isinstance(self.model, FSDPModule):
            return  # Lightning calls this again for another fit
        own = list(blocks(self.model))
        if self.compiled:
            # To dynamo, blocks of one class are one function, with a graph per block for training and for validation.
            config = torch._dynamo.config
            config.recompile_limit = max(config.recompile_limit, 2 * len(own))
            for module in own or [self.model]:
                module.compile()
        for module in [*own, self.model]:
            fully_shard(module, mesh=mesh["shard"])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images.to(memory_format=torch.channels_last) if self.channels_last else images)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        images, labels = self.mix(*batch) if self.mix else batch
        loss = nn.functional.cross_entropy(self(images), labels, label_smoothing=self.label_smoothing)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        # DDP copies rank 0's batch-norm statistics before a forward pass, so they differ after the last one; with FSDP2
        # each rank has its own. A checkpoint holds rank 0's, so validate with those.
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
        # Already equal on all ranks. Lightning wants them synchronised, and the maximum of equal numbers is exact.
        self.log_dict(
            {"val_acc": correct / images, "val_loss": loss / images}, prog_bar=True, sync_dist=True, reduce_fx="max"
        )

    def configure_optimizers(self) -> Any:
        data = self.trainer.datamodule  # pyrefly: ignore[missing-attribute] - the Trainer's, of Lightning's connector
        assert isinstance(data, SharedImages)
        make = self.optimizer
        sharded_sgd = isinstance(self.model, FSDPModule) and make.func is torch.optim.SGD
        if self.trainer.precision == "16-mixed" or sharded_sgd:  # Lightning would not clip; torch lacks the kernel
            make = partial(make, fused=False)
        optimizer = make(self.parameter_groups())
        schedule = self.scheduler(optimizer, data.epoch_steps, self.trainer.max_epochs or 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """All parameters, with a separate group for those without weight decay."""
        groups: tuple[list[Any], list[Any]] = ([], [])
        for name, parameter in self.named_parameters():
            without = not self.decay_all and (parameter.dim() <= 1 or name.endswith(POSITIONS))
            groups[without].append(parameter)
        every = ({"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0})
        made = [group for group in every if group["params"]]
        return with_rules(made, self.model) if self.optimizer.func is MuonAdamW else made
