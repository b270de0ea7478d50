"""What benchmarks train, and how: networks by name, and one training step by method name.

- `compute` exchanges nothing; `ddp` is torch's, and `fp16_hook` and `powersgd_hook` are torch's hooks for it.
- A compressor, with options after a colon and a topology after an @: `dgc:sparsity=0.99@two_phase`. With a topology,
  its steps are those of the strategies; without one, those of a plain `GradientAverager`. `int8`, `bf16`, `fp16` and
  `none`, which have no topology, are always as in the strategies, inside DDP.
- Rounds of K steps: `local` waits for the average, `dga` applies it K steps late, `auto` chooses K and D; all accept a
  compressor after a colon (`dga:onebit`). `sparseloco` waits, `sparseloco-late` is K steps late.
- `hsdp` is FSDP2 with one replica per node, `hsdp+dgc` the same with a `GradientAverager` between replicas.

Private: `Switched` uses DDPHook and spare_buffers of `plugin`, as the Trainer's strategy does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torchvision
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lightning_gradcomp as lgc
from lightning_gradcomp.app.models import NETWORKS, gpt_small
from lightning_gradcomp.plugin.ddp_hook import DDPHook, spare_buffers

WHOLE = 1_000_000
"""MB of a DDP bucket that holds everything: torch's PowerSGD hook hangs on gloo with two."""

FINAL = {"warmup_epochs": 0, "dense_epochs": 0, "start_sparsity": 0.9999}
"""Options that make a compressor skip its warm-up, so that all steps are like most of a run."""

TITLES = {
    "compute": "computation alone",
    "no_exchange": "computation alone",
    "dgc": "`dgc`",
    "powersgd_hook": "torch's PowerSGD hook, rank 4",
    "fp16_hook": "torch's fp16 hook",
    "ddp": "DDP",
    "hsdp": "FSDP2's own all-reduce",
}
"""Methods with a title of their own in tables, in the order of the rows."""

VOCABULARY = 50_257
"""Number of GPT-2's tokens."""

ROUNDS = ("local", "dga", "auto", "sparseloco", "sparseloco-late")

Step = Callable[[torch.Tensor, torch.Tensor], None]
"""Trains on (images, labels)."""


@dataclass(frozen=True)
class Method:
    """How a model is trained: a step, and its averager if that is one of lightning_gradcomp's."""

    step: Step
    averager: lgc.GradientAverager | lgc.DelayedAverager | None = None

    @property
    def period(self) -> int:
        """K, the number of steps in a round; 1 for a method that averages at each step."""
        return self.averager.period if isinstance(self.averager, lgc.DelayedAverager) else 1


def title(method: str) -> str:
    """The method's title in a table: "dgc@all_gather" and "hsdp+dgc" are `dgc`, and "eden:bits=2" is `eden` bits=2."""
    word = method.partition("@")[0].removeprefix("hsdp+")
    name, _, options = word.partition(":")
    return TITLES.get(word, f"`{name}` {options}".strip())


def device() -> torch.device:
    """This rank's device: a GPU if there is one. Ranks share GPUs if a node has too few."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def wait(device: torch.device) -> None:
    """Wait until a GPU has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def network(name: str) -> nn.Module:
    """`torchvision.resnet18` with ImageNet's stem, the recipes' `resnet18` with one for small images, `small`, or
    `gpt_small` with GPT-2's vocabulary."""
    if name == "gpt_small":
        return gpt_small(vocabulary=VOCABULARY, context=1024)
    source, _, model = name.rpartition(".")
    if source:
        return torchvision.models.get_model(model, num_classes=10)
    return small() if name == "small" else NETWORKS[name](channels=3, classes=10, size=32)


def batch(model: str, number: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images of `size` pixels per side with labels; for `gpt_small`, windows of `size` tokens with the next."""
    generator = torch.Generator().manual_seed(seed)
    if model == "gpt_small":
        tokens = torch.randint(0, VOCABULARY, (number, size + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    images = torch.randn(number, 3, size, size, generator=generator)
    return images, torch.randint(0, 10, (number,), generator=generator)


def small() -> nn.Module:
    """A network of 85,000 parameters, to study delay alone: its 340 kB take little bandwidth."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(256, 204), nn.ReLU(),
        nn.Linear(204, 10),
    )  # fmt: skip


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, fused as in the command."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with torch's defaults, fused as in the command."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


def forward_backward(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    loss(model, images, labels).backward()


def loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(images).flatten(0, -2), labels.flatten())


def compressor(method: str) -> lgc.Compressor:
    """The compressor for `dgc`, or with options `dgc:values=bf16;dense_values=bf16`; without warm-up."""
    name, _, options = method.partition(":")
    [cls] = [entry.cls for entry in lgc.entries() if entry.name == name]
    known = {field.name for field in fields(cls)}
    given = dict(option.split("=") for option in options.split(";") if option)
    read = {key: json.loads(value) if value[0].isdigit() else value for key, value in given.items()}
    return cls(**({key: value for key, value in FINAL.items() if key in known} | read))


def method(name: str, optimizer: str, model: nn.Module, period: int = 8) -> Method:
    """How `name` trains `model` from now on, with one of OPTIMIZERS. All ranks hold the same weights.

    Args:
        period: K for rounds; the smallest K for `auto`.
    """
    if name.partition("+")[0] == "hsdp":
        return hsdp(name, optimizer, model)
    stepped = OPTIMIZERS[optimizer](model)
    if name in ("compute", "ddp", "fp16_hook", "powersgd_hook"):
        trained = model if name == "compute" else with_hook(name, model, init_sync=False)
        return Method(_stepping(trained, stepped))
    kind, _, codec = name.partition(":")
    if kind in ROUNDS:
        averager = rounds(kind, codec, model, stepped, period)
        return Method(_stepping(model, averager), averager)
    codec, at, topology = name.partition("@")
    made = compressor(codec)
    averager = lgc.GradientAverager(model, made, optimizer=stepped, topology=topology or "all_gather")
    if at or not isinstance(made, lgc.LossyCompressor):
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
    """The averager of one of ROUNDS."""
    if kind.startswith("sparseloco"):
        pace = {"period": period, "delay": period if kind == "sparseloco-late" else 0}
        return lgc.DelayedAverager(model, optimizer, **{**lgc.SPARSELOCO, **pace})
    delay = {"local": 0, "dga": period, "auto": "auto"}[kind]
    return lgc.DelayedAverager(model, optimizer, compressor(codec) if codec else "none", period=period, delay=delay)


def hsdp(name: str, optimizer: str, model: nn.Module) -> Method:
    """HSDP: FSDP2, which all-reduces every gradient between replicas, or FSDP2 with a compressor between them."""
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = int(os.environ["WORLD_SIZE"]) // per_node
    mesh = init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=("replicate", "shard"))
    _, _, between = name.partition("+")
    inside = mesh["shard"] if between else mesh
    for module in reversed(list(model.modules())):  # larger modules separately, as in a model of many blocks
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
    """A step as in the strategies: DDP wraps the model and does dense steps itself."""

    def __init__(self, model: nn.Module, averager: lgc.GradientAverager, optimizer: torch.optim.Optimizer) -> None:
        self._ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
        self._averager, self._optimizer = averager, optimizer
        spare_buffers(self._ddp, averager.compressor)
        self._hook = DDPHook(self._ddp)

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self._ddp.zero_grad(set_to_none=True)
        decision = self._averager.begin_step()
        with self._averager.local_weights():
            with self._hook.forward(decision):
                found = loss(self._ddp, images, labels)
            self._hook.before_backward(self._averager, decision)
            found.backward()
        turn = self._hook.after_backward(self._averager)
        if turn.ddp_seconds is None:
            self._averager.average()
        else:
            self._averager.after_dense_step(seconds=turn.ddp_seconds)
        self._optimizer.step()


def with_hook(
    method: str, model: nn.Module, dense_steps: int = 2, *, init_sync: bool = True
) -> DistributedDataParallel:
    """Plain DDP, DDP with one of torch's compression hooks, or with a hook that exchanges nothing.

    Args:
        dense_steps: torch's PowerSGD hook starts after this many steps, at least 2.
        init_sync: False if all ranks hold the same weights, which DDP then does not send.
    """
    cap = {"bucket_cap_mb": WHOLE} if method == "powersgd_hook" else {}
    ddp = DistributedDataParallel(model, init_sync=init_sync, **cap)
    if method == "fp16_hook":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if method == "powersgd_hook":  # with the default rank of lgc.PowerSGD
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=dense_steps)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    if method == "no_exchange":
        ddp.register_comm_hook(None, _keep)
    return ddp


def _keep(state, bucket):  # torch rejects string annotations
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
