"""What benchmarks train, and how: a network by its name, and one step of it with a method by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from functools import partial

import torch
import torchvision
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import lightning_gradcomp as lgc
from lightning_gradcomp.app.models import NETWORKS
from lightning_gradcomp.averaging import Stats
from lightning_gradcomp.plugin.ddp_hook import DDPHook, spare_buffers

WHOLE = 1_000_000
"""MB of a DDP bucket that holds everything: torch's PowerSGD hook hangs on gloo with two."""

FINAL = {"warmup_epochs": 0, "dense_epochs": 0, "start_sparsity": 0.9999}
"""Options without which a compressor begins with other steps than those that most of a run consists of."""

Step = Callable[[torch.Tensor, torch.Tensor], Stats | None]
"""Trains on (images, labels); returns what this rank's exchange cost, where somebody counts."""


def forward_backward(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    torch.nn.functional.cross_entropy(model(images), labels).backward()


def network(name: str) -> torch.nn.Module:
    """`torchvision.resnet18`, with ImageNet's stem, or `resnet18`, the recipes', with one for small images."""
    source, _, model = name.rpartition(".")
    if source:
        return torchvision.models.get_model(model, num_classes=10)
    return NETWORKS[name](channels=3, classes=10, size=32)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """With momentum, fused as in the command."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """With torch's defaults, fused as in the command."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}

RECIPE = partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=5e-3, fused=True)
"""The optimizer of recipe=digits."""


def stepper(method: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Step:
    """How `method` trains `model`: "compute", "ddp", a hook of torch's, a compressor; by SGD if no optimizer is given.

    With options after a colon, and after an @ a topology: "dgc:sparsity=0.99@two_phase". Steps are then those of the
    strategies; without a topology, those of a `GradientAverager` alone.
    """
    optimizer = optimizer or sgd(model)
    if method in ("compute", "ddp", "fp16_hook", "powersgd_hook"):
        wrapped = model if method == "compute" else with_hook(method, model)

        def plain(images: torch.Tensor, labels: torch.Tensor) -> None:
            forward_backward(wrapped, images, labels)
            optimizer.step()

        return plain
    name, at, topology = method.partition("@")
    averager = lgc.GradientAverager(model, compressor(name), optimizer=optimizer, topology=topology or "all_gather")
    if at:
        return Switched(model, averager, optimizer)

    def averaged(images: torch.Tensor, labels: torch.Tensor) -> Stats:
        with averager.local_weights():
            forward_backward(model, images, labels)
        averager.step()
        return averager.stats

    return averaged


class Switched:
    """A step as the strategies make it: DDP wraps the model, and does dense steps itself."""

    def __init__(
        self, model: torch.nn.Module, averager: lgc.GradientAverager, optimizer: torch.optim.Optimizer
    ) -> None:
        self._ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.averager, self._optimizer = averager, optimizer
        spare_buffers(self._ddp, averager.compressor)
        self._hook = DDPHook(self._ddp)

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> Stats:
        self._ddp.zero_grad(set_to_none=True)
        decision = self.averager.begin_step()
        with self.averager.local_weights():
            with self._hook.forward(decision):
                loss = torch.nn.functional.cross_entropy(self._ddp(images), labels)
            self._hook.before_backward(self.averager, decision, None)
            loss.backward()
        self._hook.after_backward(self.averager)
        with self._hook.stepping():
            self._optimizer.step()
        return self.averager.stats


def with_hook(method: str, model: torch.nn.Module, dense_steps: int = 2) -> DistributedDataParallel:
    """DDP as it is, with one of torch's compressing hooks, or with one that exchanges nothing.

    Args:
        dense_steps: torch's PowerSGD hook starts after them; it takes no fewer than 2.
    """
    ddp = DistributedDataParallel(model, **({"bucket_cap_mb": WHOLE} if method == "powersgd_hook" else {}))
    if method == "fp16_hook":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if method == "powersgd_hook":  # of the rank that lgc.PowerSGD has by default
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=dense_steps)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    if method == "no_exchange":
        ddp.register_comm_hook(None, _keep)
    return ddp


def _keep(state, bucket):  # torch refuses annotations that are strings
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def compressor(method: str) -> lgc.Compressor:
    """`dgc`, or with options `dgc:values=bf16;dense_values=bf16`; without warm-up."""
    name, _, options = method.partition(":")
    [cls] = [entry.cls for entry in lgc.entries() if entry.name == name]
    known = {field.name for field in fields(cls)}
    given = dict(option.split("=") for option in options.split(";") if option)
    read = {key: json.loads(value) if value[0].isdigit() else value for key, value in given.items()}
    return cls(**({key: value for key, value in FINAL.items() if key in known} | read))
