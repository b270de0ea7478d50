"""Before the first process of a run or a sweep starts: every job is composed and checked, and the folder is created.

A Hydra callback, named in conf/train.yaml.

Private: Hydra's BasicSweeper, for how it splits the words of a sweep into jobs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lightning_gradcomp.app import processes, run_folder
from lightning_gradcomp.app.compose import checked
from lightning_gradcomp.app.config import HSDP, Run
from lightning_gradcomp.app.data import missing
from lightning_gradcomp.app.options.data import check_batch
from lightning_gradcomp.app.options.logger import check_installed
from lightning_gradcomp.app.redaction import redacted
from lightning_gradcomp.errors import refusal

BASIC = f"{BasicSweeper.__module__}.{BasicSweeper.__name__}"


def prepare(config: DictConfig, folder: Path, *, sweep: bool) -> Run:
    """The run that `config` describes, checked against this machine and what earlier runs have saved.

    Args:
        config: without Hydra's own part.
        folder: where the run will write.
        sweep: whether it is one of several jobs.

    Raises:
        ValueError: what can't be honoured.
    """
    run = checked(config)
    check_installed(run.logger)
    accelerator, per_node, nodes = processes.devices(run.trainer)  # raises
    if accelerator == "cpu" and run.trainer.precision == "16-mixed":  # Lightning would take bf16
        raise refusal("trainer.precision on a CPU", "16-mixed", "32-true, bf16-mixed")
    check_batch(run.data.batch_size, per_node * nodes)
    if isinstance(run.strategy, HSDP):
        run.strategy.mesh(nodes, per_node)  # raises
        if shared := processes.shared_gpus(accelerator, per_node):
            few = len(set(shared))
            allowed = f"up to {few}, one for each GPU: FSDP2 needs NCCL, which shares none; or trainer.accelerator=cpu"
            raise refusal("trainer.devices with strategy=hsdp", per_node, allowed)
    if not run.dry_run:
        processes.check_rendezvous(nodes)
        missing.check(run.data)
    run_folder.resolve_checkpoint(run, folder, sweep=sweep)
    return run


class BeforeRun(Callback):
    """Ends this process with a sentence where a job can't be honoured, or its folder belongs to another run."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        with _refusals_end_it(config):
            prepare(_without_hydra(config), Path(config.hydra.run.dir), sweep=False)
            _set_folder(config, "run")

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """For Hydra's basic sweeper: others choose a job by the results of those before it."""
        with _refusals_end_it(config):
            if config.hydra.sweeper._target_ == BASIC:
                _prepare_jobs(config)
            _set_folder(config, "sweep")


@contextmanager
def _refusals_end_it(config: DictConfig) -> Iterator[None]:
    HydraConfig.instance().set_config(config)  # for ${hydra:...} in the name of a folder
    try:
        yield
    except (ValueError, OSError, HydraException) as error:  # Hydra would print a warning and continue
        sys.exit(redacted(f"gradcomp: {error}"))


def _without_hydra(config: DictConfig) -> DictConfig:
    found = deepcopy(config)
    with read_write(found), open_dict(found):
        del found["hydra"]
    return found


def _prepare_jobs(config: DictConfig) -> None:
    """`prepare` each job of a sweep; none shares its folder with another.

    Raises:
        ValueError: what can't be honoured, and in which job.
    """
    subdirs: set[str] = set()
    for number, words in enumerate(_jobs(config)):
        job = GlobalHydra.instance().config_loader().load_sweep_config(config, words)
        with read_write(job.hydra.job):
            job.hydra.job.num, job.hydra.job.id = number, f"{job.hydra.job.name}_{number}"
        HydraConfig.instance().set_config(job)  # for ${hydra:...} in the name of its folder
        try:
            subdir = job.hydra.sweep.subdir
            prepare(_without_hydra(job), Path(config.hydra.sweep.dir) / subdir, sweep=True)
            if subdir in subdirs:
                raise refusal("hydra.sweep.subdir", subdir, "a folder for each job, such as ${hydra.job.num}")
        except ValueError as error:
            raise ValueError(f"{error} (job {number} of the sweep: {' '.join(words)})") from error
        subdirs.add(subdir)
    HydraConfig.instance().set_config(config)


def _jobs(config: DictConfig) -> list[list[str]]:
    """The overrides of each job, as the basic sweeper will make them."""
    words = [f"{name}={value}" for name, value in (config.hydra.sweeper.params or {}).items()]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    overrides = parser.parse_overrides([*words, *config.hydra.overrides.task])
    [jobs] = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    return jobs


def _set_folder(config: DictConfig, kind: str) -> None:
    """Create hydra.run.dir or hydra.sweep.dir, and lock it.

    A folder with the time in its name is a new one for each start, also for two in the same second.
    """
    node = config.hydra[kind]
    values: Any = OmegaConf.to_container(node, resolve=False)
    if "${now:" not in values["dir"]:
        if kind == "run":
            run_folder.check_origin(Path(node.dir))
        run_folder.lock(Path(node.dir))
        return
    folder = str(run_folder.create(Path(node.dir)))
    with read_write(config.hydra), open_dict(config.hydra):
        node.dir = folder
        config.hydra.overrides.hydra.append(f"hydra.{kind}.dir='{folder}'")  # a sweep composes its jobs from these
