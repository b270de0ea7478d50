"""The training step to plan for: a network of torchvision's with random images, or the user's LightningModule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_gradcomp.errors import refusal


@dataclass(frozen=True)
class Workload:
    """A model with all that a training step needs.

    Args:
        name: to print.
        model: the gradients of its parameters are exchanged.
        loss: makes a forward pass; a scalar.
        optimizer: its step follows each backward.
        batch: samples a rank and step.
    """

    name: str
    model: nn.Module
    loss: Callable[[], torch.Tensor]
    optimizer: torch.optim.Optimizer
    batch: int

    @property
    def corrected(self) -> bool:
        """Whether the optimizer is SGD, Adam or AdamW, one of which some methods need."""
        return type(self.optimizer) in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def classifier(name: str, model: nn.Module, device: torch.device, *, batch: int, size: int, classes: int) -> Workload:
    """A network for images of `size` x `size` pixels in `classes` classes, on random images, with momentum SGD."""
    model.to(device).train()
    images = torch.randn(batch, 3, size, size, dtype=next(model.parameters()).dtype, device=device)
    labels = torch.randint(classes, (batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    words = f"{name} ({classes} classes, {size}x{size})"
    return Workload(words, model, lambda: nn.functional.cross_entropy(model(images), labels), optimizer, batch)


def lightning_module(path: str, device: torch.device) -> Workload:
    """The user's `package.module:Class`, with its first batch, its training step and its optimizer.

    Raises:
        ValueError: something is missing, or needs a Trainer.
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
        raise refusal(f"{class_name}.automatic_optimization", False, "True: manual optimization needs a Trainer")

    def loss() -> torch.Tensor:
        result = module.training_step(batch, 0)
        found = result["loss"] if isinstance(result, dict) else result
        if not isinstance(found, torch.Tensor):
            raise refusal(f"{class_name}.training_step()", found, "a loss (a tensor, or a dict with 'loss')")
        return found

    try:
        module.prepare_data()
        module.setup("fit")
        module.configure_model()
        module.to(device).train()
        batch = move_data_to_device(next(iter(module.train_dataloader())), device)
        optimizer = _optimizer(class_name, module.configure_optimizers())
        loss()  # so that a wrong one is refused before anything is measured
    except RuntimeError as error:
        if "attached to a `Trainer`" not in str(error):
            raise
        raise refusal(f"{class_name}.trainer", None, "hooks that don't use it: there is no Trainer here") from error
    return Workload(path, module, loss, optimizer, extract_batch_size(batch))


def _optimizer(class_name: str, configured: Any) -> torch.optim.Optimizer:
    """The one optimizer in what `configure_optimizers` may return."""
    found = configured
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list):  # and schedulers
        found = found[0]
    if isinstance(found, (list, tuple)) and len(found) == 1:
        [found] = found
    if isinstance(found, dict):
        found = found.get("optimizer")
    if not isinstance(found, torch.optim.Optimizer) or isinstance(found, torch.optim.LBFGS):
        allowed = "one optimizer, which takes one gradient a step"
        raise refusal(f"{class_name}.configure_optimizers()", configured, allowed)
    return found
