"""The network whose steps are planned: one of torchvision's by a word, or the user's LightningModule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from statistics import median
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_gradcomp.app.forecast import Computation
from lightning_gradcomp.averaging.link import slowest, timed
from lightning_gradcomp.errors import refusal

BUDGET = 3.0
"""Seconds to time steps for."""

FEWEST, MOST = 3, 20
"""Steps that are timed."""


@dataclass(frozen=True)
class Subject:
    """What is trained for the measurement.

    Args:
        name: in words.
        model: whose parameters' gradients are exchanged.
        loss: makes a forward pass.
        optimizer: steps after each backward.
        batch: samples a rank and step.
    """

    name: str
    model: nn.Module
    loss: Callable[[], torch.Tensor]
    optimizer: torch.optim.Optimizer
    batch: int

    @property
    def sgd(self) -> bool:
        """Whether every method can be used with the optimizer."""
        return type(self.optimizer) is torch.optim.SGD

    def measure(self, group: dist.ProcessGroup | None, device: torch.device) -> Computation:
        """The medians of a few steps without an exchange, of the slowest rank; collective where there is a group.

        The last step's gradients stay.
        """
        backwards: list[float] = []

        def step() -> None:
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.loss()
            backwards.append(timed(loss.backward, device)[0])
            self.optimizer.step()

        for _ in range(2):  # the first also makes buffers
            [seconds] = slowest([timed(step, device)[0]], group, device)
        backwards.clear()
        times = []
        for _ in range(min(max(FEWEST, round(BUDGET / seconds)), MOST)):
            if group:
                dist.barrier(group)
            times.append(timed(step, device)[0])
        # each step waits for the rank that is the slowest in it
        return Computation(*(median(slowest(steps, group, device)) for steps in (times, backwards)))


def classifier(name: str, model: nn.Module, device: torch.device, *, batch: int, size: int, classes: int) -> Subject:
    """A network for images of `size` x `size` in `classes` classes, with random ones, trained by SGD with momentum."""
    model.to(device).train()
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.randint(classes, (batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    words = f"{name} ({classes} classes, {size}x{size})"
    return Subject(words, model, lambda: nn.functional.cross_entropy(model(images), labels), optimizer, batch)


def lightning_module(path: str, device: torch.device) -> Subject:
    """The user's `package.module:Class`, with its first batch, its training step and its optimizer.

    Raises:
        ValueError: something is missing, or can't be used without a Trainer.
    """
    module_name, _, class_name = path.partition(":")
    try:
        cls = getattr(import_module(module_name), class_name, None)
    except ModuleNotFoundError as error:
        raise refusal("MODEL", path, f"a class that can be imported: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, L.LightningModule)):
        raise refusal("MODEL", path, "a LightningModule; that module has no such class")
    try:
        module = cls()
    except TypeError as error:
        raise refusal(f"{class_name}()", error, "a constructor that needs no argument") from error
    for method in ("training_step", "configure_optimizers", "train_dataloader"):
        if not is_overridden(method, module):
            raise refusal(f"{class_name}.{method}", None, "a method of the class's own")
    if not module.automatic_optimization:
        raise refusal(f"{class_name}.automatic_optimization", False, "True: without a Trainer, nothing else can be run")
    module.prepare_data()
    module.setup("fit")
    module.configure_model()
    module.to(device).train()
    batch = move_data_to_device(next(iter(module.train_dataloader())), device)
    optimizer = _optimizer(class_name, module.configure_optimizers())

    def loss() -> torch.Tensor:
        result = module.training_step(batch, 0)
        found = result["loss"] if isinstance(result, dict) else result
        if not isinstance(found, torch.Tensor):
            raise refusal(f"{class_name}.training_step()", found, "a loss (a tensor, or a dict with 'loss')")
        return found

    loss()  # so that a wrong one is refused before anything is measured
    return Subject(path, module, loss, optimizer, extract_batch_size(batch))


def _optimizer(class_name: str, configured: Any) -> torch.optim.Optimizer:
    """The one optimizer in what `configure_optimizers` may return."""
    found = configured
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list):  # and schedulers
        found = found[0]
    if isinstance(found, (list, tuple)) and len(found) == 1:
        [found] = found
    if isinstance(found, dict):
        found = found.get("optimizer")
    if not isinstance(found, torch.optim.Optimizer):
        raise refusal(f"{class_name}.configure_optimizers()", configured, "one optimizer")
    return found
