"""What all tasks share: a network, its optimizer and its validation, independent of compression."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_gradcomp.app.data.shared import SharedData
from lightning_gradcomp.app.muon import MuonAdamW, blocks, with_rules
from lightning_gradcomp.app.pretrained import freeze, load_weights
from lightning_gradcomp.app.scheduler import WarmupCosine

POSITIONS = "relative_position_bias_table"
"""A parameter of Swin's attention: two-dimensional, but not the weight of a linear layer."""


class Task(L.LightningModule, ABC):
    """A network to train. A subclass defines the loss, and what a validation counts. Options: conf/task.

    `optimizer` makes a torch optimizer from parameter groups.
    """

    data: ClassVar[type[SharedData]]
    """What the task trains on."""
    monitor: ClassVar[str]
    """The metric by which the best weights are chosen."""
    mode: ClassVar[str]
    """"max" or "min"."""
    counts: tuple[float, ...] = ()
    """Sums of the last validation over all batches and ranks; empty before it."""
    validated_step: int = -1
    """Number of optimizer steps before the last validation."""
    has_trained: bool = False
    """True after a training batch."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: partial[torch.optim.Optimizer],
        scheduler: WarmupCosine,
        decay_all: bool,
        compile: bool,
        weights: str | None = None,
        frozen: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if weights is not None:
            load_weights(model, weights)
        if frozen is not None:
            freeze(model, frozen)
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.decay_all, self.compiled = decay_all, compile

    @abstractmethod
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The loss of a batch."""

    @abstractmethod
    def count(self, batch: Any) -> torch.Tensor:
        """Numbers of a validation batch, fp64, 1-D, to be summed over all batches and ranks."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Metrics to log, from `counts`."""

    @abstractmethod
    def result(self) -> dict[str, float]:
        """Entries of summary.json, from `counts`."""

    @abstractmethod
    def words(self) -> tuple[str, str]:
        """The result to print: its name and its value."""

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

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.has_trained = True
        if 0 < self.trainer.max_steps <= self.trainer.global_step:
            self.trainer.should_stop = True  # Lightning then validates, also amid an epoch

    def on_validation_epoch_start(self) -> None:
        # DDP copies rank 0's batch-norm statistics before a forward pass, so they differ after the last one; with FSDP2
        # each rank has its own. A checkpoint holds rank 0's, so validate with those.
        for buffer in self.buffers():
            dist.broadcast(buffer, src=0)
        self.sums = torch.zeros((), dtype=torch.float64, device=self.device)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.sums = self.sums + self.count(batch)

    def on_validation_epoch_end(self) -> None:
        dist.all_reduce(self.sums)
        self.counts, self.validated_step = tuple(self.sums.tolist()), self.trainer.global_step
        # Already equal on all ranks. Lightning wants them synchronised, and the maximum of equal numbers is exact.
        self.log_dict(self.metrics(), prog_bar=True, sync_dist=True, reduce_fx="max")

    def configure_optimizers(self) -> Any:
        data = self.trainer.datamodule  # pyrefly: ignore[missing-attribute] - the Trainer's, of Lightning's connector
        assert isinstance(data, SharedData)
        make = self.optimizer
        sharded_sgd = isinstance(self.model, FSDPModule) and make.func is torch.optim.SGD
        if self.trainer.precision == "16-mixed" or sharded_sgd:  # Lightning would not clip; torch lacks the kernel
            make = partial(make, fused=False)
        optimizer = make(self.parameter_groups())
        schedule = self.scheduler(optimizer, data.epoch_steps, self.trainer.max_epochs or 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """All parameters that train, with a separate group for those without weight decay."""
        groups: tuple[list[Any], list[Any]] = ([], [])
        training = [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]
        for name, parameter in training:
            without = not self.decay_all and (parameter.dim() <= 1 or name.endswith(POSITIONS))
            groups[without].append(parameter)
        every = ({"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0})
        made = [group for group in every if group["params"]]
        return with_rules(made, self.model) if self.optimizer.func is MuonAdamW else made
