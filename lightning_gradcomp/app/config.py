"""What a run is made of: the types and limits of every option. The values are in conf/ and recipes/.

Options that are wrong alone, or that don't fit each other, are refused here: on the command line before any process
starts, and again where the training process reads the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_gradcomp.compressors import Compressor
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.outer import Nesterov
from lightning_gradcomp.pace import Pace
from lightning_gradcomp.registry import entries
from lightning_gradcomp.routes import route


def one_of(what: str, got: object, allowed: tuple[str, ...]) -> None:
    """ValueError unless `got` is among `allowed`."""
    if got not in allowed:
        raise refusal(what, got, ", ".join(allowed))


def at_least(what: str, got: float, least: float) -> None:
    """ValueError if `got` is below `least`."""
    if got < least:
        raise refusal(what, got, f"{least} or more")


MODELS = ("resnet18", "resnet50", "swin_mini")


@dataclass(kw_only=True, slots=True)
class Model:
    """The network, with the stem for small images."""

    name: str

    def __post_init__(self) -> None:
        one_of("model.name", self.name, MODELS)


@dataclass(kw_only=True, slots=True)
class Data:
    """The images. `batch_size`: images a step over all ranks together, before accumulation."""

    name: str
    batch_size: int

    def __post_init__(self) -> None:
        one_of("data.name", self.name, ("digits",))
        at_least("data.batch_size", self.batch_size, 1)


@dataclass(kw_only=True, slots=True)
class Optimizer:
    """Peak learning rate, reached after `warmup_steps` and followed by a cosine to 0; both per optimizer step."""

    lr: float
    weight_decay: float
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
class Strategy:
    """When ranks average what."""


@dataclass(kw_only=True, slots=True)
class DDP(Strategy):
    """Gradients, at every step."""


@dataclass(kw_only=True, slots=True)
class DGA(Strategy):
    """Updates of `period` steps, applied `delay` steps late: `DelayedStrategy`. An `outer_lr` makes it DiLoCo."""

    period: int
    delay: Any  # int or "auto"
    stale_only: bool
    outer_lr: float | None
    outer_momentum: float

    def __post_init__(self) -> None:
        Pace(self.period, self.delay)  # refuses
        self.outer()

    def outer(self) -> Nesterov | None:
        """The outer optimizer."""
        return None if self.outer_lr is None else Nesterov(self.outer_lr, self.outer_momentum)


STRATEGIES: dict[str, type[Strategy]] = {"ddp": DDP, "dga": DGA}


def name_of(option: Compressor | Optimizer | Strategy) -> str:
    """The word on the command line that chooses this option's class."""
    ours = {**OPTIMIZERS, **STRATEGIES}
    names = {cls: name for name, cls in ours.items()} | {entry.cls: entry.name for entry in entries()}
    return names[type(option)]


@dataclass(kw_only=True, slots=True)
class Trainer:
    """Lightning's Trainer options of the same names; the limits are in batches an epoch, null is all of them.

    `devices: auto` is every GPU that is there, else 2 processes on the CPU. Where torchrun or SLURM has started the
    ranks, "auto" is what they have started.
    """

    max_epochs: int
    devices: Any  # int or "auto"; a union here fails an assertion inside OmegaConf 2.3
    num_nodes: Any
    accelerator: str
    precision: str
    accumulate_grad_batches: int
    deterministic: bool
    limit_train_batches: int | None = None
    limit_val_batches: int | None = None
    log_every_n_steps: int
    enable_progress_bar: bool

    def __post_init__(self) -> None:
        one_of("trainer.accelerator", self.accelerator, ("auto", "cpu", "cuda"))
        one_of("trainer.precision", self.precision, ("32-true", "bf16-mixed", "16-mixed"))
        for option in ("devices", "num_nodes"):
            got = getattr(self, option)
            if got != "auto" and not (type(got) is int and got >= 1):
                raise refusal(f"trainer.{option}", got, "auto, or a number from 1")
        for option in ("max_epochs", "accumulate_grad_batches", "log_every_n_steps"):
            at_least(f"trainer.{option}", getattr(self, option), 1)
        for option in ("limit_train_batches", "limit_val_batches"):
            if (got := getattr(self, option)) is not None:
                at_least(f"trainer.{option}", got, 1)


@dataclass(kw_only=True, slots=True)
class Logger:
    """Where the metrics of every step go: metrics.csv in the run's folder, TensorBoard files beside it, or nowhere."""

    name: str

    def __post_init__(self) -> None:
        one_of("logger.name", self.name, ("csv", "tensorboard", "none"))


@dataclass(kw_only=True, slots=True)
class Run:
    """One run: everything that decides its result."""

    seed: int
    topology: str
    inside: str | None
    residual_device: str | None
    model: Model
    data: Data
    compressor: Compressor
    strategy: Strategy
    optimizer: Optimizer
    trainer: Trainer
    logger: Logger

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)
        route(self.topology, self.inside, self.residual_device, self.compressor)  # refuses
        if type(self.strategy) is DGA:
            one_of("topology with strategy=dga", self.topology, ("auto", "all_gather"))
            for option in ("inside", "residual_device"):
                if (got := getattr(self, option)) is not None:
                    raise refusal(f"{option} with strategy=dga", got, "null: payloads of rounds go to every rank")
        if self.compressor.owns_momentum and type(self.optimizer) is not SGD:
            others = ", ".join(entry.name for entry in entries() if not entry.cls.owns_momentum)
            raise refusal(
                f"optimizer with compressor={name_of(self.compressor)}",
                name_of(self.optimizer),
                f"sgd, whose momentum this compressor computes; compressors for any optimizer: {others}",
            )
