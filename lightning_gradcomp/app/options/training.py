"""The network, its optimizer, and Lightning's Trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_gradcomp.app.options.limits import at_least, one_of
from lightning_gradcomp.errors import refusal

MODELS = ("resnet18", "resnet50", "swin_mini", "swin_t")


@dataclass(kw_only=True, slots=True)
class Model:
    """The network; for images of up to 64 pixels its stem is one for small images."""

    name: str

    def __post_init__(self) -> None:
        one_of("model.name", self.name, MODELS)


@dataclass(kw_only=True, slots=True)
class Optimizer:
    """Peak learning rate, reached after `warmup_steps` and followed by a cosine to 0; both per optimizer step.

    `decay_all: false` spares biases, norm weights and Swin's position biases the weight decay.
    """

    lr: float
    weight_decay: float
    decay_all: bool
    warmup_steps: int

    def __post_init__(self) -> None:
        for option in ("lr", "weight_decay", "warmup_steps"):
            at_least(f"optimizer.{option}", getattr(self, option), 0)


@dataclass(kw_only=True, slots=True)
class SGD(Optimizer):
    """torch.optim.SGD."""

    momentum: float
    nesterov: bool

    def __post_init__(self) -> None:
        super(SGD, self).__post_init__()
        if not 0 <= self.momentum < 1:
            raise refusal("optimizer.momentum", self.momentum, "0 <= momentum < 1")
        if self.nesterov and not self.momentum:
            raise refusal("optimizer.nesterov", self.nesterov, "false without momentum")


@dataclass(kw_only=True, slots=True)
class AdamW(Optimizer):
    """torch.optim.AdamW."""


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adamw": AdamW}


@dataclass(kw_only=True, slots=True)
class Trainer:
    """Lightning's Trainer options of the same names; the limits are in batches an epoch, null is all of them.

    `devices: auto` is every GPU that is there, else 2 processes on the CPU. Where torchrun or SLURM has started the
    ranks, "auto" is what they have started. `patience`: epochs without a better validation accuracy after which the run
    ends (EarlyStopping); null for all epochs.
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
            got = getattr(self, option)
            if got != "auto" and not (type(got) is int and got >= 1):
                raise refusal(f"trainer.{option}", got, "auto, or a number from 1")
        for option in ("max_epochs", "accumulate_grad_batches", "log_every_n_steps"):
            at_least(f"trainer.{option}", getattr(self, option), 1)
        for option in ("patience", "limit_train_batches", "limit_val_batches"):
            if (got := getattr(self, option)) is not None:
                at_least(f"trainer.{option}", got, 1)
        if (clip := self.gradient_clip_val) is not None and clip <= 0:
            raise refusal("trainer.gradient_clip_val", clip, "a norm above 0, or null")
