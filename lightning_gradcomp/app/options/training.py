"""Options of the network, of its optimizer, and of Lightning's Trainer."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from lightning_gradcomp.app.options.limits import number, one_of, whole
from lightning_gradcomp.errors import refusal

MOST_PROCESSES = 65536
"""Processes a node, and nodes, above which a number is taken for a mistake."""

MODELS = ("resnet18", "resnet50", "swin_mini", "swin_t")


@dataclass(kw_only=True)
class Model:
    """The network. Images of up to 64 pixels get a stem for small images."""

    name: str

    def __post_init__(self) -> None:
        one_of("model.name", self.name, MODELS)


@dataclass(kw_only=True)
class Optimizer:
    """Peak learning rate, reached after `warmup_steps` and followed by a cosine to 0; both per optimizer step.

    `decay_all: false`: no weight decay for biases, norm weights and Swin's position biases.
    """

    lr: float
    weight_decay: float
    decay_all: bool
    warmup_steps: int

    def __post_init__(self) -> None:
        number("optimizer.lr", self.lr, 0)
        number("optimizer.weight_decay", self.weight_decay, 0)
        whole("optimizer.warmup_steps", self.warmup_steps, 0)


@dataclass(kw_only=True)
class SGD(Optimizer):
    """torch.optim.SGD."""

    momentum: float
    nesterov: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise refusal("optimizer.momentum", self.momentum, "0 <= momentum < 1")
        if self.nesterov and not self.momentum:
            raise refusal("optimizer.nesterov", self.nesterov, "false without momentum")


@dataclass(kw_only=True)
class AdamW(Optimizer):
    """torch.optim.AdamW."""


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adamw": AdamW}


@dataclass(kw_only=True)
class Trainer:
    """Lightning's Trainer options of the same names. `limit_*`: batches in an epoch; null for all of them.

    `devices: auto` is every GPU, else 2 processes on the CPU. Where torchrun or SLURM has started the ranks, "auto" is
    their number. `patience`: the run ends after so many epochs without a better validation accuracy (EarlyStopping);
    null for all epochs.
    """

    max_epochs: int
    devices: Any  # int or "auto"; a union here fails an assertion inside OmegaConf 2.3
    num_nodes: Any
    accelerator: str
    precision: str
    accumulate_grad_batches: int
    gradient_clip_val: float | None = None
    deterministic: bool
    patience: int | None = None
    profiler: str | None = None
    limit_train_batches: int | None = None
    limit_val_batches: int | None = None
    log_every_n_steps: int
    enable_progress_bar: bool

    def __post_init__(self) -> None:
        one_of("trainer.accelerator", self.accelerator, ("auto", "cpu", "cuda"))
        one_of("trainer.precision", self.precision, ("32-true", "bf16-mixed", "16-mixed"))
        if self.profiler is not None:
            one_of("trainer.profiler", self.profiler, ("simple", "advanced", "pytorch"))
        for option in ("devices", "num_nodes"):
            if (got := getattr(self, option)) != "auto":
                whole(f"trainer.{option}", got, 1, MOST_PROCESSES, also="auto, or ")
        for option in ("max_epochs", "accumulate_grad_batches", "log_every_n_steps"):
            whole(f"trainer.{option}", getattr(self, option), 1)
        for option in ("patience", "limit_train_batches", "limit_val_batches"):
            if (got := getattr(self, option)) is not None:
                whole(f"trainer.{option}", got, 1, also="null, or ")
        if (clip := self.gradient_clip_val) is not None and not 0 < clip < inf:
            raise refusal("trainer.gradient_clip_val", clip, "a finite norm above 0, or null")
