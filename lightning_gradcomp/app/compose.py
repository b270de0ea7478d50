"""Builds the objects of a run from the files in conf/ and recipes/."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from hydra.core.config_store import ConfigStore
from hydra.utils import get_class, instantiate
from lightning.pytorch.strategies import ParallelStrategy
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn

from lightning_gradcomp.app import sharding
from lightning_gradcomp.app.callbacks import SaveOnSigterm, SeedEachStep
from lightning_gradcomp.app.data import SharedData
from lightning_gradcomp.app.ranks import Ranks, place
from lightning_gradcomp.app.task import Task
from lightning_gradcomp.averaging.fsdp.mesh import mesh_shape
from lightning_gradcomp.errors import Refused, is_whole, refusal
from lightning_gradcomp.plugin import CommunicationMonitor, CompressedHSDPStrategy
from lightning_gradcomp.registry import entries

PACKAGE = Path(__file__).resolve().parents[1]
LAST = Path("checkpoints") / "last.ckpt"
DRY_BATCH = 2
"""Examples per rank and step in a dry run."""


def shipped(folder: str) -> Path:
    """Path of `conf` or `recipes`: next to the package in a checkout, inside it in a wheel."""
    return (PACKAGE.parent if (PACKAGE.parent / "pyproject.toml").exists() else PACKAGE) / folder


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


def use_own_compressor(config: DictConfig, words: list[str]) -> None:
    """Move the compressor of a strategy that has its own, such as strategy=powersgd, to `config.compressor`.

    Args:
        words: the overrides on the command line.

    Raises:
        ValueError: if they also name a compressor.
    """
    if "compressor" not in config.strategy:
        return
    if given := [word for word in words if word.startswith("compressor")]:
        raise refusal("compressor with a strategy of its own", given[0], "strategy.compressor.OPTION, or strategy=ddp")
    with open_dict(config):
        config.compressor = config.strategy.pop("compressor")


class Run(NamedTuple):
    """The objects of a run."""

    task: Task
    data: SharedData
    trainer: L.Trainer
    ranks: Ranks


def build(config: DictConfig) -> Run:
    """Instantiate a composed config.

    Raises:
        ValueError: if an option's class, Lightning or this machine does not accept it.
    """
    ranks = place(config.trainer.accelerator, config.trainer.devices, config.trainer.num_nodes)
    _check_numbers(config)
    L.seed_everything(config.seed, workers=True, verbose=False)
    data = instantiate(config.data, _convert_="all")
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
        sharding.check(task, strategy.compressor, shape[1])
    return Run(task, data, _trainer(config, ranks, strategy), ranks)


def build_task(config: DictConfig, data: SharedData) -> Task:
    """The task of a composed config, with its network, for `data`.

    Raises:
        ValueError: if they don't go together, or the optimizer does not accept an option.
    """
    make = instantiate(config.task, _convert_="all")
    if not isinstance(data, make.func.data):
        allowed = f"a {make.func.data.__name__} with task={config.task._target_}"
        raise refusal("data", config.data._target_, allowed)
    model = instantiate(config.model, _convert_="all")
    if not isinstance(model, nn.Module):
        try:
            model = model(**data.model_options)
        except TypeError as error:
            raise Refused(f"model: {error}") from error
    task = make(model=model, data=data)
    try:
        task.optimizer(task.parameter_groups())
    except (ValueError, TypeError) as error:
        raise Refused(f"optimizer: {error}") from error
    return task


def _check_numbers(config: DictConfig) -> None:
    """Raises ValueError for numbers that Lightning accepts but the learning rate schedule does not."""
    if not is_whole(config.seed) or not 0 <= config.seed < 2**32:
        raise refusal("seed", config.seed, f"a whole number from 0 to {2**32 - 1}")
    for option in ("max_epochs", "accumulate_grad_batches", "limit_train_batches"):
        got = config.trainer[option]
        is_all = option.startswith("limit") and got is None
        if not is_all and (not is_whole(got) or got < 1):
            raise refusal(f"trainer.{option}", got, "a whole number from 1")


def _strategy(config: DictConfig, ranks: Ranks) -> ParallelStrategy:
    """The strategy, given the devices if ranks share GPUs."""
    options: dict[str, Any] = {}
    if shared := ranks.shared_gpus:
        if config.strategy._target_.endswith(CompressedHSDPStrategy.__name__):
            few = len(set(shared))
            raise refusal("trainer.devices with strategy=hsdp", ranks.per_node, f"up to {few}, one for each GPU")
        options = {"parallel_devices": shared, "process_group_backend": "gloo"}
    compressor = instantiate(config.compressor, _convert_="all")
    if config.dry_run and hasattr(compressor, "warmup_steps"):
        compressor = replace(compressor, warmup_steps=0, warmup_epochs=None)
    return instantiate(config.strategy, _partial_=True, _convert_="all")(compressor=compressor, **options)


def _trainer(config: DictConfig, ranks: Ranks, strategy: ParallelStrategy) -> L.Trainer:
    keeps = not (config.dry_run or config.evaluate)
    options: dict[str, Any] = {"enable_checkpointing": keeps}
    callbacks = list(instantiate(config.callbacks, _convert_="all").values())
    callbacks += [SeedEachStep(config.seed), CommunicationMonitor()]
    if "ema" in config.callbacks and isinstance(strategy, CompressedHSDPStrategy):
        raise refusal("callbacks with strategy=hsdp", "ema", "others: Lightning's moving average needs whole weights")
    if keeps:
        callbacks.append(SaveOnSigterm(Path(config.folder) / LAST))
        options["logger"] = list(instantiate(config.logger, _convert_="all").values())
    else:
        callbacks = [each for each in callbacks if not isinstance(each, L.pytorch.callbacks.Checkpoint)]
        options["logger"] = False
    if config.dry_run:
        options |= {"max_epochs": 2, "limit_train_batches": 2, "limit_val_batches": 1, "accumulate_grad_batches": 1}
    gpus = len(set(ranks.shared_gpus))
    return instantiate(config.trainer, _partial_=True, _convert_="all")(
        accelerator=ranks.accelerator,
        devices=gpus or ranks.per_node,  # Lightning accepts no more than there are GPUs; the strategy has the ranks
        num_nodes=ranks.nodes,
        strategy=strategy,
        callbacks=callbacks,
        **options,
    )
