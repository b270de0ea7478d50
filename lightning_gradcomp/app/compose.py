"""Builds the objects of a run from the files in conf/ and recipes/, with the callbacks that every run has."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import InstantiationException
from hydra.utils import get_class, get_object, instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn

from lightning_gradcomp.app.annotations import misfits
from lightning_gradcomp.app.data import SharedData
from lightning_gradcomp.app.ranks import Placement, place
from lightning_gradcomp.app.task import Task
from lightning_gradcomp.averaging.fsdp.shards import Sharding, mesh_shape
from lightning_gradcomp.averaging.gradients import check_shards
from lightning_gradcomp.compressors import Compressor
from lightning_gradcomp.compressors.kernels.rng import seed_of
from lightning_gradcomp.errors import Refused, is_whole, refusal
from lightning_gradcomp.plugin import CommunicationMonitor, CompressedHSDPStrategy
from lightning_gradcomp.registry import entries

LIBRARIES = {
    "lightning_gradcomp", "hydra", "omegaconf", "torch", "torchvision", "timm", "lightning", "lightning_utilities",
    "numpy", "PIL", "sklearn", *sys.stdlib_module_names,
}  # fmt: skip
"""Top-level modules of the classes in conf/, and what these call."""
OPTION_ERRORS = (ValueError, TypeError, ImportError, OSError, LookupError, AttributeError, MisconfigurationException)
"""What those classes raise for an option that they don't accept."""
PACKAGE = Path(__file__).resolve().parents[1]
LAST = Path("checkpoints") / "last.ckpt"
DRY_BATCH = 2
"""Examples per rank and step in a dry run."""


def shipped(folder: str) -> Path:
    """Path of `conf` or `recipes`: next to the package in a checkout, inside it in a wheel."""
    return (PACKAGE.parent if (PACKAGE.parent / "pyproject.toml").exists() else PACKAGE) / folder


def groups() -> dict[str, list[str]]:
    """The choices of each group in conf/."""
    found: dict[str, list[str]] = {}
    for path in sorted(shipped("conf").glob("*/*.yaml")):
        found.setdefault(path.parent.name, []).append(path.stem)
    return found


def names() -> set[str]:
    """What a run's options may begin with: groups, and options of the run itself."""
    return {*groups(), "recipe", *map(str, OmegaConf.load(shipped("conf") / "train.yaml"))} - {"defaults"}


def check_groups(words: Sequence[str]) -> None:
    """Raises ValueError for a missing, deleted or unknown group or option of the run: Hydra would not name the choices.

    Args:
        words: the overrides on the command line.
    """
    choices, known = groups(), names()
    for word in words:
        key, _, value = word.partition("=")
        is_deleted, name = key.startswith("~"), key.removeprefix("~")
        if name in known - {"recipe"} and (is_deleted or (value == "null" and name in choices)):
            raise refusal(name, word if is_deleted else None, ", ".join(choices.get(name, ["a value"])))
        first = re.split("[./@]", name)[0]
        if not key.startswith(("+", "-")) and "=" in word and first not in known:
            raise refusal(first, word, ", ".join(sorted(known)))


def register() -> None:
    """Register what is not in conf/ with Hydra: recipes, compressors of other packages, and resolvers."""
    store = ConfigStore.instance()
    for path in shipped("recipes").glob("*.yaml"):
        store.store(group="recipe", name=path.stem, node=OmegaConf.load(path), package="_global_")
    for entry in entries():
        if not (shipped("conf") / "compressor" / f"{entry.name}.yaml").exists():
            target = {"_target_": f"{entry.cls.__module__}.{entry.cls.__qualname__}"}
            store.store(group="compressor", name=entry.name, node=target)
    OmegaConf.register_new_resolver("per_256", per_256, replace=True)
    OmegaConf.register_new_resolver("of_task", of_task, replace=True)


def per_256(lr: float, *, _root_: DictConfig) -> float:
    """Scale `lr`, given for 256 images, to the images of an optimizer step (Goyal et al. 2017, arXiv 1706.02677)."""
    return float(lr) * _root_.data.batch_size * _root_.trainer.accumulate_grad_batches / 256


def of_task(attribute: str, *, _root_: DictConfig) -> str:
    """`monitor` or `mode` of the task's class."""
    return getattr(get_class(_root_.task._target_), attribute)


def apply_overrides(config: DictConfig, words: Sequence[str]) -> None:
    """Move what a strategy brings with it, as strategy=powersgd does its compressor, to its group of `config`."""
    typed = {}  # first word of what is overridden -> override
    for override in OverridesParser.create().parse_overrides(list(words)):
        typed.setdefault(override.key_or_group.partition(".")[0], override.input_line)
    for group in {"compressor", "optimizer"} & {*config.strategy}:
        if word := typed.get(group):
            raise refusal(f"{group} with a strategy of its own", word, f"strategy.{group}.OPTION, or strategy=ddp")
        with open_dict(config):
            config[group] = config.strategy.pop(group)
    if "recipe" in config:
        allowed = "a file with `# @package _global_` as its first line: without it, nothing uses the recipe"
        raise refusal("recipe", typed.get("recipe", "recipe"), allowed)
    known = names()
    for name, word in typed.items():
        if name in config and name not in known and f"${{{name}" not in OmegaConf.to_yaml(config):
            raise refusal(name, word, f"{', '.join(sorted(known))}; or a name that another value refers to")
    if "augment" in typed and "augment" not in config.task:
        raise refusal(f"augment with task={config.task._target_}", typed["augment"], "nothing: it augments images")
    if config.folder is not None:
        raise refusal("folder", config.folder, "null; hydra.run.dir=FOLDER sets the run's folder")


class Run(NamedTuple):
    """The objects of a run."""

    task: Task
    data: SharedData
    trainer: L.Trainer
    ranks: Placement


def build(config: DictConfig) -> Run:
    """Instantiate a composed config."""
    ranks = place(config.trainer.accelerator, config.trainer.devices, config.trainer.num_nodes)
    _check_numbers(config)
    L.seed_everything(config.seed, workers=True, verbose=False)
    data = instantiated("data", config)
    if config.dry_run:
        data = data.stand_in(DRY_BATCH * ranks.world)
    else:
        data.check()
    data.check_batch(ranks.world)
    task = build_task(config, data)
    strategy = _strategy(config, ranks)
    if isinstance(strategy, CompressedHSDPStrategy):
        shape = mesh_shape(config.strategy.replicate, config.strategy.shard, ranks.nodes, ranks.per_node)
        if config.task.get("channels_last"):
            raise refusal("task.channels_last with strategy=hsdp", True, "false: FSDP2 does not support such weights")
        check_sharding(task, strategy.compressor, shape[1])
    return Run(task, data, _trainer(config, ranks, strategy), ranks)


def build_task(config: DictConfig, data: SharedData) -> Task:
    """The task of a composed config, with its network, for `data`."""
    own = {"task": {"weights": None}} if config.ckpt and "weights" in config.task else {}  # the checkpoint has them
    make = instantiated("task", OmegaConf.merge(config, own))
    if not isinstance(data, make.func.data):
        allowed = f"a {make.func.data.__name__} with task={config.task._target_}"
        raise refusal("data", config.data._target_, allowed)
    model = instantiated("model", config)
    if isinstance(model, partial):
        model = complete("model", model, **data.model_options)
    task = complete("task", make, model=model, data=data)
    optimizer = task.optimizer
    call("optimizer", optimizer, partial(optimizer, task.parameter_groups()))
    return task


def instantiated(group: str, config: Any, **how: Any) -> Any:
    """The object that `config.GROUP` describes.

    Raises:
        Refused: for an option that its class does not accept.
    """
    return call(group, config[group], partial(instantiate, config[group], _convert_="all", **how))


def complete(group: str, make: partial[Any], **arguments: Any) -> Any:
    """Call `make` with `arguments`, which are not options of `group`.

    Raises:
        Refused: if one of them was set on the command line, or for an option that the class does not accept.
    """
    for name in arguments:
        if name in make.keywords:
            raise refusal(f"{group}.{name}", make.keywords[name], "no value: gradcomp sets it")
    return call(group, make, partial(make, **arguments))


def call(group: str, described: partial[Any] | DictConfig, make: Callable[[], Any]) -> Any:
    """`make()`, whose errors about the options of `group` become Refused. Errors of the user's code remain.

    A class describes a wrong value best. Where it has no words for a wrong type, its annotations have.
    """
    try:
        made = make()
    except (InstantiationException, *OPTION_ERRORS) as error:
        cause = (error.__cause__ or error) if isinstance(error, InstantiationException) else error
        is_about_options = isinstance(cause, (InstantiationException, *OPTION_ERRORS)) and not in_users_code(cause)
        if is_about_options and not isinstance(cause, Refused):
            if not isinstance(cause, (ValueError, ImportError, OSError)):
                _check_types(group, described)
            raise Refused(f"{group}: {cause}") from cause
        raise cause from cause.__cause__  # without Hydra's error around it
    if not isinstance(made, partial):  # else `complete` checks it
        _check_types(group, described)
    return made


def _check_types(group: str, described: partial[Any] | DictConfig) -> None:
    """Raises Refused for the first option whose type is not one that a class of `LIBRARIES` is annotated with."""
    is_config = isinstance(described, DictConfig)
    for where, target, options in _classes(
        group, OmegaConf.to_container(described, resolve=True) if is_config else described
    ):
        if target.__module__.partition(".")[0] in LIBRARIES:
            for name, value, allowed in misfits(target, options):
                raise refusal(f"{where}.{name}", value, allowed)


def _classes(where: str, described: Any) -> Iterator[tuple[str, Callable[..., Any], Mapping[Any, Any]]]:
    """Where each class is described, the class and its options, in a partial or in a config with `_target_`."""
    if isinstance(described, partial):
        yield where, described.func, described.keywords
    elif isinstance(described, Mapping):
        if "_target_" in described:
            yield where, get_object(described["_target_"]), described
        for key, part in described.items():
            yield from _classes(f"{where}.{key}", part)


def in_users_code(error: BaseException | None) -> bool:
    """True if the traceback of `error`, or of its cause, has a line of a module that is not of `LIBRARIES`."""
    if error is None:
        return False
    modules = {frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)}
    return bool({name.partition(".")[0] for name in modules} - LIBRARIES) or in_users_code(error.__cause__)


def check_sharding(module: nn.Module, compressor: Compressor, shards: int) -> None:
    """Raises ValueError if the model can't be divided into `shards`, or the compressor can't handle its shards."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    for name, shape in shapes.items():
        if not shape:
            raise refusal(f"the shape of parameter {name!r} with strategy=hsdp", shape, "one dimension or more")
    last = {name: Sharding(0, shards).shape(shape, shards - 1) for name, shape in shapes.items()}
    check_shards(compressor, compressor.choose(shapes), last)


def _check_numbers(config: DictConfig) -> None:
    """Raises ValueError for numbers that Lightning accepts but the learning rate schedule does not."""
    if not is_whole(config.seed) or not 0 <= config.seed < 2**32:
        raise refusal("seed", config.seed, f"a whole number from 0 to {2**32 - 1}")
    for option in ("evaluate", "dry_run"):
        if not isinstance(got := config[option], bool):
            raise refusal(option, got, "true, false")
    if (got := config.trainer.get("max_steps", -1)) == 0:
        raise refusal("trainer.max_steps", got, "-1, or a whole number from 1")
    for option in ("max_epochs", "accumulate_grad_batches", "limit_train_batches"):
        got = config.trainer[option]
        is_all = option.startswith("limit") and got is None
        if not is_all and (not is_whole(got) or got < 1):
            raise refusal(f"trainer.{option}", got, "a whole number from 1")


def _strategy(config: DictConfig, ranks: Placement) -> ParallelStrategy:
    """The strategy, given the devices if ranks share GPUs."""
    options: dict[str, Any] = {}
    if shared := ranks.shared_gpus:
        if config.strategy._target_.endswith(CompressedHSDPStrategy.__name__):
            few = len(set(shared))
            raise refusal("trainer.devices with strategy=hsdp", ranks.per_node, f"up to {few}, one for each GPU")
        options = {"parallel_devices": shared, "process_group_backend": "gloo"}
    compressor = instantiated("compressor", config)
    if config.dry_run:
        none = {"warmup_steps": 0, "warmup_epochs": None, "dense_epochs": 0}
        compressor = replace(compressor, **{name: value for name, value in none.items() if hasattr(compressor, name)})
    return complete("strategy", instantiated("strategy", config, _partial_=True), compressor=compressor, **options)


def _trainer(config: DictConfig, ranks: Placement, strategy: ParallelStrategy) -> L.Trainer:
    keeps = not (config.dry_run or config.evaluate)
    options: dict[str, Any] = {"enable_checkpointing": keeps}
    callbacks = list(instantiated("callbacks", config).values())
    callbacks += [SeedEachStep(config.seed), CommunicationMonitor()]
    if "ema" in config.callbacks and isinstance(strategy, CompressedHSDPStrategy):
        raise refusal("callbacks with strategy=hsdp", "ema", "others: Lightning's moving average needs whole weights")
    if keeps:
        last = SaveLast(Path(config.folder) / LAST)
        callbacks = [last, *callbacks]  # first: at the end a moving average replaces the weights
        options["logger"] = list(instantiated("logger", config).values())
    else:
        callbacks = [each for each in callbacks if not isinstance(each, L.pytorch.callbacks.Checkpoint)]
        options["logger"] = False
    resolved: dict[str, Any] = {"accelerator": ranks.accelerator, "num_nodes": ranks.nodes}
    # Lightning accepts no more devices than there are GPUs; the strategy has the ranks.
    resolved["devices"] = len(set(ranks.shared_gpus)) or ranks.per_node
    if config.dry_run:
        resolved |= {"max_epochs": 2, "limit_train_batches": 2, "limit_val_batches": 1, "accumulate_grad_batches": 1}
    make = instantiated("trainer", OmegaConf.merge(config, {"trainer": resolved}), _partial_=True)
    return complete("trainer", make, strategy=strategy, callbacks=callbacks, **options)


class SeedEachStep(L.Callback):
    """Makes a step's random draws, such as MixUp's shares and dropped paths, a function of (seed, rank, epoch, batch).

    Ranks draw different numbers. A resumed run draws the same numbers as an uninterrupted one, without saved state.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        torch.manual_seed(seed_of(self.seed, trainer.global_rank, trainer.current_epoch, batch_idx))


class SaveLast(L.Callback):
    """Writes a checkpoint at the end of a run, and when a SIGTERM ends it after a step of all ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> Any:
        if isinstance(exception, SIGTERMException):
            trainer.save_checkpoint(self.path, weights_only=False)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.checkpoint_callbacks:
            trainer.save_checkpoint(self.path, weights_only=False)
