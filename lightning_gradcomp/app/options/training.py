"""Options of the network, of its optimizer, and of Lightning's Trainer."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from math import inf
from typing import Any

from lightning_gradcomp.app.options.limits import number, one_of, whole
from lightning_gradcomp.compressors.schedules import BY, Ramp, as_levels
from lightning_gradcomp.errors import refusal

MOST_PROCESSES = 65536
"""Processes a node, and nodes, above which a number is taken for a mistake."""

EMA_STEPS = 32
"""Optimizer steps between updates of the moving average, unless given."""

MODELS = ("resnet18", "resnet50", "swin_mini", "swin_t")


LIBRARIES = ("torchvision", "timm", "custom")


@dataclass(kw_only=True)
class Model:
    """The network.

    Args:
        name: one of `MODELS`, which have stems for images of up to 64 pixels; with a library, its name there.
        library: "torchvision" or "timm": any of its classifiers, as it is; "custom": `target`. None: `MODELS`.
        target: "module:Name" of what makes the network.
        options: keyword arguments for the library's function, or for `target`.
    """

    name: str
    library: str | None = None
    target: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.library is None:
            one_of("model.name", self.name, MODELS)
            if self.options:
                raise refusal(f"model.options with model={self.name}", self.options, "{}; others have options")
        else:
            one_of("model.library", self.library, LIBRARIES)
        if self.library == "timm" and not find_spec("timm"):
            raise ValueError("needs a package for model=timm: pip install timm (missing: timm)")
        if self.library == "custom":
            if not re.fullmatch(r"[\w.]+:\w+", self.target or ""):
                raise refusal("model.target", self.target, "module:Name, of a class or function")
        elif self.target is not None:
            raise refusal(f"model.target with model={self.library or self.name}", self.target, "null; or model=custom")


@dataclass(kw_only=True)
class Optimizer:
    """Peak learning rate, reached after the warm-up and followed by a cosine; per optimizer step.

    Args:
        lr: the peak; None where `lr_per_256` says it.
        lr_per_256: the peak for 256 images a step: the linear scaling rule (Goyal et al. 2017, arXiv 1706.02677, 2.1).
        warmup_steps: optimizer steps of linear warm-up; None where `warmup_epochs` says it.
        warmup_epochs: the same in epochs, which may be broken.
        end: what the cosine ends at, as a share of the peak.
        decay_all: false: no weight decay for biases, norm weights and Swin's position biases.
        fused: torch's kernel that reads and writes each weight once a step; not used with a loss scaler ("16-mixed"),
            with which Lightning could not clip, nor by SGD with strategy=hsdp, for which torch has none. False for SGD
            where a parameter may get its first gradient later than others: torch's fails there.
    """

    lr: float | None
    lr_per_256: float | None = None
    weight_decay: float
    decay_all: bool
    fused: bool = True
    end: float = 0.0
    warmup_steps: int | None
    warmup_epochs: float | None = None

    def __post_init__(self) -> None:
        for option, other in (("lr", "lr_per_256"), ("warmup_steps", "warmup_epochs")):
            got, instead = getattr(self, option), getattr(self, other)
            if (got is None) == (instead is None):
                raise refusal(f"optimizer.{option} with {other}={instead}", got, "one of the two, the other null")
        for option in ("lr", "lr_per_256", "warmup_epochs"):
            if (got := getattr(self, option)) is not None:
                number(f"optimizer.{option}", got, 0)
        number("optimizer.weight_decay", self.weight_decay, 0)
        number("optimizer.end", self.end, 0, 1)
        if self.warmup_steps is not None:
            whole("optimizer.warmup_steps", self.warmup_steps, 0)

    def peak(self, images: int) -> float:
        """The peak learning rate with `images` in an optimizer step, over all ranks."""
        if self.lr is not None:
            return self.lr
        assert self.lr_per_256 is not None
        return self.lr_per_256 * images / 256

    def warmup(self, epoch_steps: int) -> int:
        """Optimizer steps of warm-up, where an epoch has `epoch_steps`."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        assert self.warmup_epochs is not None
        return round(self.warmup_epochs * epoch_steps)


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
class Warmup:
    """A warm-up of the sparsity in place of the compressor's own: `SparsityWarmup`.

    Args:
        schedule: "exponential", "linear", or a list of sparsities; None: the compressor's own warm-up.
        periods: number of levels of "exponential" and "linear".
        by: "epoch", "step" or "coverage": what a level lasts.
        dense: epochs of dense training before the first level; steps, where `by` is not "epoch".
    """

    schedule: Any = None  # a union of str and list is none of OmegaConf's
    periods: int = 4
    by: str = "epoch"
    dense: int = 0

    def __post_init__(self) -> None:
        whole("sparsity_warmup.periods", self.periods, 0)
        whole("sparsity_warmup.dense", self.dense, 0)
        one_of("sparsity_warmup.by", self.by, BY)
        if self.schedule is not None:
            Ramp(as_levels(self.schedule, 0.999, self.periods), 0.999, self.dense, self.by)  # refuses
            return
        for option in fields(self):
            if (got := getattr(self, option.name)) != option.default:
                allowed = f"{option.default}; others with sparsity_warmup=exponential or linear"
                raise refusal(f"sparsity_warmup.{option.name} without a schedule", got, allowed)


@dataclass(kw_only=True)
class Trainer:
    """Lightning's Trainer options of the same names. `limit_*`: batches in an epoch; null for all of them.

    `devices`: ranks a node. "auto": one for each GPU; on a single node at least two, which share its only GPU or run on
    the CPU; under torchrun or SLURM as many as it has started. More ranks than GPUs share them and exchange over gloo.
    `patience`: the run ends after so many epochs without a better validation accuracy (EarlyStopping); null for all
    epochs. `checkpoint_every_n_epochs`, `checkpoint_every_n_steps`: how often last.ckpt is written besides at the end;
    one of the two, the other null.

    `channels_last`: images and weights in that memory format, which tensor cores want for convolutions. `compile`:
    torch.compile of the network. `ema_decay`: an exponential moving average of the weights, updated every
    `ema_every_n_steps`, is what is validated, saved in best.ckpt, and left at the end; null for none.
    """

    max_epochs: int
    devices: Any  # int or "auto"; a union here fails an assertion inside OmegaConf 2.3
    num_nodes: Any
    accelerator: str
    precision: str
    channels_last: bool = False
    compile: bool = False
    ema_decay: float | None = None
    ema_every_n_steps: int = EMA_STEPS
    accumulate_grad_batches: int
    gradient_clip_val: float | None = None
    deterministic: bool
    patience: int | None = None
    profiler: str | None = None
    limit_train_batches: int | None = None
    limit_val_batches: int | None = None
    checkpoint_every_n_epochs: int | None
    checkpoint_every_n_steps: int | None = None
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
        steps = self.checkpoint_every_n_steps
        if (self.checkpoint_every_n_epochs is None) == (steps is None):
            what = f"trainer.checkpoint_every_n_epochs with checkpoint_every_n_steps={steps}"
            raise refusal(what, self.checkpoint_every_n_epochs, "one of the two, the other null")
        often = ("checkpoint_every_n_epochs", "checkpoint_every_n_steps")
        for option in ("patience", "limit_train_batches", "limit_val_batches", *often):
            if (got := getattr(self, option)) is not None:
                whole(f"trainer.{option}", got, 1, also="null, or ")
        whole("trainer.ema_every_n_steps", self.ema_every_n_steps, 1)
        if (decay := self.ema_decay) is not None and not 0 < decay < 1:
            raise refusal("trainer.ema_decay", decay, "0 < ema_decay < 1, or null")
        if decay is None and self.ema_every_n_steps != EMA_STEPS:
            allowed = f"{EMA_STEPS}; others with trainer.ema_decay"
            raise refusal("trainer.ema_every_n_steps without trainer.ema_decay", self.ema_every_n_steps, allowed)
        if (clip := self.gradient_clip_val) is not None and not 0 < clip < inf:
            raise refusal("trainer.gradient_clip_val", clip, "a finite norm above 0, or null")
