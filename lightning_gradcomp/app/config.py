"""A run: every option that decides its result, by group.

Options that are wrong alone, or that don't fit each other, are refused here: by the command line before it starts a
process, and again where the training process reads the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_gradcomp.app.options.data import DATA, SMALL, Augment, Data, Files, ImageFolder
from lightning_gradcomp.app.options.limits import number, one_of, whole
from lightning_gradcomp.app.options.logger import LOGGERS, Logger
from lightning_gradcomp.app.options.training import OPTIMIZERS, AdamW, Model, Optimizer, Trainer, Warmup
from lightning_gradcomp.averaging.checkpoint_state import CHECKPOINT_STATES
from lightning_gradcomp.averaging.mesh import mesh_shape
from lightning_gradcomp.averaging.topology import resolve
from lightning_gradcomp.compressors import Compressor, Lossy
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.local_sgd.anchor import check_pending_share
from lightning_gradcomp.local_sgd.outer_optimizer import Nesterov
from lightning_gradcomp.local_sgd.participants import Participants
from lightning_gradcomp.local_sgd.rounds import check_error_decay
from lightning_gradcomp.parameter_server.server import check_compressor
from lightning_gradcomp.registry import build, entries


@dataclass(kw_only=True)
class Strategy:
    """What the ranks average, and when. `timeout`: seconds that a rank waits for the others, then it ends."""

    timeout: float

    def __post_init__(self) -> None:
        if type(self.timeout) not in (int, float) or not 0 < self.timeout < math.inf:
            raise refusal("strategy.timeout", self.timeout, "a finite number of seconds above 0")


@dataclass(kw_only=True)
class WholeModels(Strategy):
    """Every rank has the whole model. `checkpoint_state`: where a checkpoint has what the ranks have not sent."""

    checkpoint_state: str

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("strategy.checkpoint_state", self.checkpoint_state, CHECKPOINT_STATES)


def check_verification(every_n_steps: int | None) -> None:
    """ValueError for a number of steps between two comparisons of replicas that is none; None is never."""
    if every_n_steps is not None:
        whole("strategy.verify_replicas_every_n_steps", every_n_steps, 1, also="null, or ")


@dataclass(kw_only=True)
class DDP(WholeModels):
    """Gradients, at every step. `verify_replicas_every_n_steps`: how often parameters are compared; None: never."""

    verify_replicas_every_n_steps: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_verification(self.verify_replicas_every_n_steps)


@dataclass(kw_only=True)
class HSDP(Strategy):
    """Gradients, at every step, of models that are sharded inside each replica: `CompressedHSDPStrategy`."""

    replicate: Any  # int or "auto"
    shard: Any
    save_distributed_checkpoint: bool
    verify_replicas_every_n_steps: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("replicate", "shard"):
            if (got := getattr(self, option)) != "auto":
                whole(f"strategy.{option}", got, 1, also="auto, or ")
        check_verification(self.verify_replicas_every_n_steps)

    def mesh(self, nodes: int, per_node: int) -> tuple[int, int]:
        """(replicas, shards of each) on these nodes, with so many ranks each; ValueError where they don't fit."""
        return mesh_shape(self.replicate, self.shard, nodes, per_node)


@dataclass(kw_only=True)
class DGA(WholeModels):
    """Updates of `period` steps, applied `delay` steps late: `DelayedStrategy`.

    An `outer_lr` makes it DiLoCo, an `error_decay` SparseLoCo.
    """

    period: int
    delay: Any  # int or "auto"
    stale_only: bool
    outer_lr: float | None
    outer_momentum: float
    pending_share: float | None
    participation: float
    error_decay: float | None

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("strategy.period", self.period, 1)
        if self.delay != "auto":  # at most one average is on its way at a time
            whole("strategy.delay", self.delay, 0, self.period, also="auto, or ")
        if self.outer_lr is None and self.outer_momentum != Nesterov.momentum:
            what = "strategy.outer_momentum without outer_lr"
            raise refusal(what, self.outer_momentum, f"{Nesterov.momentum}: there is no outer optimizer")
        if self.outer_lr is not None:
            number("strategy.outer_lr", self.outer_lr, 0)
        check_pending_share(self.pending_share, stale_only=self.stale_only)
        Participants(self.participation)
        check_error_decay(self.error_decay)
        if self.error_decay is None and self.checkpoint_state != "auto":
            allowed = "auto: a drain leaves nothing that a rank alone remembers"
            raise refusal("strategy.checkpoint_state without error_decay", self.checkpoint_state, allowed)
        self.outer()

    def outer(self) -> Nesterov | None:
        """The outer optimizer."""
        return None if self.outer_lr is None else Nesterov(self.outer_lr, self.outer_momentum)


@dataclass(kw_only=True)
class DistAsync(WholeModels):
    """Pushes and pulls without waiting: `AsyncStrategy`."""

    staleness: Any  # int or "any"
    max_staleness: int | None
    rate_by_staleness: bool
    pull: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.checkpoint_state == "mean":
            raise refusal("strategy.checkpoint_state with strategy=dist_async", "mean", "auto, gather, sidecar, drop")
        if self.staleness != "any":
            whole("strategy.staleness", self.staleness, 0, also="any, or ")
        if self.max_staleness is not None:
            whole("strategy.max_staleness", self.max_staleness, 0)
        if self.pull is not None:
            one_of("strategy.pull", self.pull, tuple(entry.name for entry in entries()))
        if (pulls := self.pulls) is not None:
            check_compressor(pulls)

    @property
    def bound(self) -> float:
        """The staleness."""
        return math.inf if self.staleness == "any" else self.staleness

    @property
    def pulls(self) -> Compressor | None:
        """The compressor of the pulls."""
        return None if self.pull is None else build(self.pull)


STRATEGIES: dict[str, type[Strategy]] = {"ddp": DDP, "dga": DGA, "dist_async": DistAsync, "hsdp": HSDP}

ONE_CLASS: dict[str, type] = {"model": Model, "augment": Augment, "sparsity_warmup": Warmup, "trainer": Trainer}
"""Groups whose choices are values of one class."""

NOT_AUGMENTED = {
    "interpolation": "bilinear",
    "resize": None,
    "repeats": 1,
    "crop_and_flip": False,
    "trivial_augment": False,
    "random_erase": 0,
}
"""Options of `Augment` for images that are not in files."""
WARMUPS = ("warmup_steps", "warmup_epochs", "dense_epochs", "start_sparsity")
"""Options of compressors that say how their own warm-up goes."""


def classes() -> dict[str, Mapping[str, type]]:
    """Groups whose choices are classes: group -> name -> class. The compressors are the registry's of now."""
    compressors = {entry.name: entry.cls for entry in entries()}
    ours = {"data": DATA, "strategy": STRATEGIES, "optimizer": OPTIMIZERS, "logger": LOGGERS}
    return {"compressor": compressors, **ours}


def name_of(group: str, option: object) -> str:
    """The word on the command line that chooses this option's class."""
    [name] = [name for name, cls in classes()[group].items() if cls is type(option)]
    return name


@dataclass(kw_only=True)
class Run:
    """One run.

    Args:
        ckpt: the checkpoint to resume from, or with `evaluate` to validate; on the command line also "last" and "best".
        evaluate: validate the checkpoint, without training.
        dry_run: four steps on random images of the data's shape; no data is read, no checkpoint is written.
    """

    seed: int
    topology: str
    inside: str | None
    residual_device: str | None
    ckpt: str | None
    evaluate: bool
    dry_run: bool
    model: Model
    data: Data
    augment: Augment
    compressor: Compressor
    sparsity_warmup: Warmup
    strategy: Strategy
    optimizer: Optimizer
    trainer: Trainer
    logger: Logger

    def __post_init__(self) -> None:
        whole("seed", self.seed, 0, 2**32 - 1)  # numpy's limits
        self._check_mode()
        self._check_data()
        self._check_exchange()

    def _check_mode(self) -> None:
        if self.evaluate and self.ckpt is None:
            raise refusal("ckpt with evaluate=true", None, "best, last, a run's folder, or a .ckpt file")
        if self.dry_run and self.ckpt is not None:
            raise refusal("ckpt with dry_run=true", self.ckpt, "null: a dry run starts from nothing")

    def _check_data(self) -> None:
        if not isinstance(self.data, Files):
            name = name_of("data", self.data)
            for option, allowed in NOT_AUGMENTED.items():
                if (got := getattr(self.augment, option)) != allowed:
                    raise refusal(f"augment.{option} with data={name}", got, f"{allowed}: images are not augmented")
        elif (resize := self.augment.resize) is not None:
            size = self.data.size if isinstance(self.data, ImageFolder) else SMALL
            if size <= SMALL:
                allowed = f"null: images of {SMALL} pixels or fewer are not cropped"
                raise refusal("augment.resize", resize, allowed)
            if resize < size:
                raise refusal("augment.resize", resize, f"null, or from data.size={size} on")

    def _check_exchange(self) -> None:
        resolve(self.topology, self.inside, self.residual_device, self.compressor)  # raises
        why: dict[type, str] = {
            DGA: "payloads of rounds go to every rank",
            DistAsync: "payloads go to the servers",
            HSDP: "FSDP averages inside a replica",
        }
        if type(self.strategy) in why:
            name = name_of("strategy", self.strategy)
            one_of(f"topology with strategy={name}", self.topology, ("auto", "all_gather"))
            for option in ("inside",) if isinstance(self.strategy, HSDP) else ("inside", "residual_device"):
                if (got := getattr(self, option)) is not None:
                    raise refusal(f"{option} with strategy={name}", got, f"null: {why[type(self.strategy)]}")
        if isinstance(self.strategy, DistAsync):
            check_compressor(self.compressor)
            for option, made in (("compressor", self.compressor), ("strategy.pull", self.strategy.pulls)):
                if isinstance(made, Lossy) and isinstance(self.optimizer, AdamW):
                    allowed = "none, fp16, bf16; with optimizer=sgd also those that compress"
                    what = f"{option} with strategy=dist_async optimizer=adamw"
                    raise refusal(what, name_of("compressor", made), allowed)
        if isinstance(self.strategy, HSDP):
            what = "trainer.{} with strategy=hsdp"
            if (decay := self.trainer.ema_decay) is not None:
                raise refusal(what.format("ema_decay"), decay, "null: Lightning's moving average keeps whole weights")
            if self.trainer.channels_last:
                raise refusal(what.format("channels_last"), True, "false: FSDP2 refuses such weights")
        if self.sparsity_warmup.schedule is not None:
            one_of("strategy with sparsity_warmup", name_of("strategy", self.strategy), ("ddp", "hsdp"))
            sparse = tuple(entry.name for entry in entries() if hasattr(entry.cls, "sparsity"))
            one_of("compressor with sparsity_warmup", name_of("compressor", self.compressor), sparse)
            for option in fields(self.compressor):
                if option.name in WARMUPS and (got := getattr(self.compressor, option.name)) != option.default:
                    allowed = f"{option.default}: sparsity_warmup takes its place"
                    raise refusal(f"compressor.{option.name} with sparsity_warmup", got, allowed)
