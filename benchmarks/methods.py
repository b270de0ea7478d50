"""What benchmarks train, and how: a network by its name, and one step of it with a method by its name.

- `compute` exchanges nothing; `ddp` is torch's, and `fp16_hook` and `powersgd_hook` are torch's hooks of it.
- A compressor, with options after a colon and a topology after an @: `dgc:sparsity=0.99@two_phase`. Its steps are then
  those of the strategies; without a topology, those of a `GradientAverager` alone.
- Rounds of K steps: `local` waits for the average, `dga` applies it K steps late, `auto` chooses K and D; with a
  compressor after a colon (`dga:onebit`). `sparseloco` waits, `sparseloco-late` is K steps late.
- `hsdp` is FSDP2 with a node as the replica, `hsdp+dgc` the same with a `GradientAverager` between replicas.

Private: `Switched` uses DDPHook and spare_buffers of `plugin`, as the Trainer's strategy does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import torch
import torchvision
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lightning_gradcomp as lgc
from lightning_gradcomp.app.models import NETWORKS
from lightning_gradcomp.plugin.ddp_hook import DDPHook, spare_buffers

WHOLE = 1_000_000
"""MB of a DDP bucket that holds everything: torch's PowerSGD hook hangs on gloo with two."""

FINAL = {"warmup_epochs": 0, "dense_epochs": 0, "start_sparsity": 0.9999}
"""Options without which a compressor begins with other steps than those that most of a run consists of."""

ROUNDS = ("local", "dga", "auto", "sparseloco", "sparseloco-late")

Step = Callable[[torch.Tensor, torch.Tensor], None]
"""Trains on (images, labels)."""


@dataclass(frozen=True)
class Method:
    """How a model is trained: a step, and the averager in it, if it is one of lightning_gradcomp's."""

    step: Step
    averager: lgc.GradientAverager | lgc.DelayedAverager | None = None

    @property
    def period(self) -> int:
        """K, the steps of a round; 1 for a method that averages at each step."""
        return self.averager.period if isinstance(self.averager, lgc.DelayedAverager) else 1


def device() -> torch.device:
    """This rank's: a GPU where there is one. Where a node has fewer GPUs than ranks, ranks share them."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def wait(device: torch.device) -> None:
    """Until a GPU has done all that it was told to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def network(name: str) -> nn.Module:
    """`torchvision.resnet18`, with ImageNet's stem; `resnet18`, the recipes', with one for small images; or `small`."""
    source, _, model = name.rpartition(".")
    if source:
        return torchvision.models.get_model(model, num_classes=10)
    return small() if name == "small" else NETWORKS[name](channels=3, classes=10, size=32)


def small() -> nn.Module:
    """A net of 85,000 parameters, for questions about delay alone: its 340 kB need no rate to speak of."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(256, 204), nn.ReLU(),
        nn.Linear(204, 10),
    )  # fmt: skip


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """With momentum, fused as in the command."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With torch's defaults, fused as in the command."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}

RECIPE = partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=5e-3, fused=True)
"""The optimizer of recipe=digits."""


def forward_backward(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(model(images), labels).backward()


def compressor(method: str) -> lgc.Compressor:
    """`dgc`, or with options `dgc:values=bf16;dense_values=bf16`; without warm-up."""
    name, _, options = method.partition(":")
    [cls] = [entry.cls for entry in lgc.entries() if entry.name == name]
    known = {field.name for field in fields(cls)}
    given = dict(option.split("=") for option in options.split(";") if option)
    read = {key: json.loads(value) if value[0].isdigit() else value for key, value in given.items()}
    return cls(**({key: value for key, value in FINAL.items() if key in known} | read))


def method(name: str, optimizer: str, model: nn.Module, period: int = 8) -> Method:
    """How `name` trains `model` from here on, by one of OPTIMIZERS.

    Args:
        period: K of rounds; of `auto`, the least.
    """
    if name.partition("+")[0] == "hsdp":
        return hsdp(name, optimizer, model)
    stepped = OPTIMIZERS[optimizer](model)
    if name in ("compute", "ddp", "fp16_hook", "powersgd_hook"):
        return Method(_stepping(model if name == "compute" else with_hook(name, model), stepped))
    kind, _, codec = name.partition(":")
    if kind in ROUNDS:
        averager = rounds(kind, codec, model, stepped, period)
        return Method(_stepping(model, averager), averager)
    codec, at, topology = name.partition("@")
    averager = lgc.GradientAverager(model, compressor(codec), optimizer=stepped, topology=topology or "all_gather")
    if at:
        return Method(Switched(model, averager, stepped), averager)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        with averager.local_weights():
            forward_backward(model, images, labels)
        averager.step()

    return Method(step, averager)


def _stepping(model: nn.Module, steps: torch.optim.Optimizer | lgc.GradientAverager | lgc.DelayedAverager) -> Step:
    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        forward_backward(model, images, labels)
        steps.step()

    return step


def rounds(
    kind: str, codec: str, model: nn.Module, optimizer: torch.optim.Optimizer, period: int
) -> lgc.DelayedAverager:
    """One of ROUNDS."""
    if kind.startswith("sparseloco"):
        pace = {"period": period, "delay": period if kind == "sparseloco-late" else 0}
        return lgc.DelayedAverager(model, optimizer, **{**lgc.SPARSELOCO, **pace})
    delay = {"local": 0, "dga": period, "auto": "auto"}[kind]
    return lgc.DelayedAverager(model, optimizer, compressor(codec) if codec else "none", period=period, delay=delay)


def hsdp(name: str, optimizer: str, model: nn.Module) -> Method:
    """FSDP2's own, which all-reduces every gradient between replicas, or with a compressor between them."""
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = int(os.environ["WORLD_SIZE"]) // per_node
    mesh = init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=("replicate", "shard"))
    _, _, between = name.partition("+")
    inside = mesh["shard"] if between else mesh
    for module in reversed(list(model.modules())):  # larger modules by themselves, as a model of many blocks would be
        own = sum(parameter.numel() for parameter in module.parameters())
        if module is not model and own > 2_000_000 and not isinstance(module, nn.Sequential):
            fully_shard(module, mesh=inside)
    fully_shard(model, mesh=inside)
    stepped = OPTIMIZERS[optimizer](model)
    if not between:
        return Method(_stepping(model, stepped))
    group = mesh.get_group("replicate")
    averager = lgc.GradientAverager(model, compressor(between), optimizer=stepped, process_group=group)
    return Method(_stepping(model, averager), averager)


class Switched:
    """A step as the strategies make it: DDP wraps the model, and does dense steps itself."""

    def __init__(self, model: nn.Module, averager: lgc.GradientAverager, optimizer: torch.optim.Optimizer) -> None:
        self._ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self._averager, self._optimizer = averager, optimizer
        spare_buffers(self._ddp, averager.compressor)
        self._hook = DDPHook(self._ddp)

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self._ddp.zero_grad(set_to_none=True)
        with self._averager.local_weights():
            with self._hook.forward(self._averager):
                loss = nn.functional.cross_entropy(self._ddp(images), labels)
            self._hook.before_backward(self._averager, None)
            loss.backward()
        self._hook.after_backward(self._averager)
        self._optimizer.step()
        self._hook.after_optimizer_step()


def with_hook(method: str, model: nn.Module, dense_steps: int = 2) -> DistributedDataParallel:
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
