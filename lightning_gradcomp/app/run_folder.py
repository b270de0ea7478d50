"""A run's folder: created for one run alone, with config.yaml; and the checkpoint of another one to resume from."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from lightning_gradcomp.app import processes
from lightning_gradcomp.app.config import HSDP, ONE_CLASS, DistAsync, Run, classes, name_of
from lightning_gradcomp.app.redaction import redacted_options
from lightning_gradcomp.errors import refusal

CONFIG = "config.yaml"
LOCK = ".lock"
"""A file in the folder that is locked (`flock`) while a run writes there."""
WRITTEN = (CONFIG, "summary.json", "evaluation.json", "metrics.csv", "report.md", "checkpoints", "secret")
"""Names in it that a run replaces, or some of them."""

LOGGER = "GRADCOMP_LOGGER"
"""Environment variable."""

_locks: dict[Path, int] = {}  # file descriptors: open until this process ends, which unlocks them


def create(folder: Path) -> Path:
    """Create `folder` for this process alone, or `folder`-2, -3, ... where it exists already.

    Raises:
        OSError: it can't be created.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        found = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            found.mkdir()
        except FileExistsError:
            if found.is_dir():
                continue
            raise
        lock(found)
        return found
    raise AssertionError


def check_origin(folder: Path) -> None:
    """ValueError where `folder` has files that a run would replace, and is not a run's."""
    if not (folder / LOCK).exists() and (found := [name for name in WRITTEN if (folder / name).exists()]):
        got = f"{folder}, with {', '.join(found)} that no run has written"
        raise refusal("hydra.run.dir", got, "a new folder, or that of a run")


def lock(folder: Path) -> None:
    """Create `folder` where it is missing, and keep other runs out of it until this process ends.

    Where the file system has no locks, nothing keeps them out.

    Raises:
        ValueError: another run that has not ended writes there.
        OSError: it can't be created or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (before := _locks.pop(folder.resolve(), None)) is not None:
        os.close(before)
    descriptor = os.open(folder / LOCK, os.O_WRONLY | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise refusal("hydra.run.dir", str(folder), "a folder that no other run, not ended yet, writes to") from None
    except OSError:  # no locks on this file system
        pass
    _locks[folder.resolve()] = descriptor


def values_of(run: Run) -> dict[str, Any]:
    """The run as plain values, each choice with its name, without secrets."""
    values: dict[str, Any] = asdict(run)
    for group in classes():
        values[group] = {"name": name_of(group, getattr(run, group))} | values[group]
    return {**values, "logger": redacted_options(values["logger"])}


def environment(run: Run) -> dict[str, str]:
    """What config.yaml does not hold, as an environment variable for the training process: the logger with secrets."""
    return {LOGGER: json.dumps(asdict(run.logger))}


def save(run: Run, folder: Path) -> None:
    """Write `run` to config.yaml in `folder`, without secrets."""
    (folder / CONFIG).write_text(yaml.safe_dump(values_of(run), sort_keys=False))


def load(folder: Path) -> Run:
    """The run whose config.yaml is in `folder`, with the secrets that `environment` has handed over.

    Raises:
        ValueError: an option that its class refuses.
    """
    values: dict[str, Any] = yaml.safe_load((folder / CONFIG).read_text())
    values["logger"] |= json.loads(os.environ.get(LOGGER, "{}"))
    for group, choices in classes().items():
        values[group] = choices[values[group].pop("name")](**values[group])
    for group, cls in ONE_CLASS.items():
        values[group] = cls(**values[group])
    return Run(**values)


def resolve_checkpoint(run: Run, folder: Path, *, sweep: bool) -> None:
    """Replace `run.ckpt` by the path of a checkpoint, for a run that writes to `folder`.

    Raises:
        ValueError: there is no such checkpoint, or it doesn't fit the run.
    """
    if run.ckpt is None:
        return
    path = _newest(run, folder, sweep) if run.ckpt in ("last", "best") else _given(run)
    if is_distributed(path):
        if not isinstance(run.strategy, HSDP):
            name = name_of("strategy", run.strategy)
            allowed = "a file, which strategy=hsdp writes with strategy.save_distributed_checkpoint=false"
            raise refusal(f"ckpt with strategy={name}", f"{path}, a distributed checkpoint", allowed)
    elif not path.is_file():
        raise refusal("ckpt", run.ckpt, "last, best, the folder of a run that has saved a checkpoint, or a .ckpt file")
    _check_fits(run, path, folder)
    run.ckpt = str(path.resolve())


def _newest(run: Run, folder: Path, sweep: bool) -> Path:
    """The newest checkpoint of the runs beside `folder`."""
    if run.ckpt == "best" and not run.evaluate:
        raise refusal("ckpt", "best", "last, to resume from: best.ckpt holds weights alone, for evaluate=true")
    if sweep or processes.started_by_launcher():
        raise refusal("ckpt", run.ckpt, "the path of a checkpoint, in sweeps and where torchrun or SLURM starts ranks")
    name = f"checkpoints/{run.ckpt}.ckpt"
    found = [*folder.parent.glob(f"*/{name}"), *folder.parent.glob(f"*/*/{name}")]  # of runs, of sweeps' jobs
    if not found:
        raise refusal("ckpt", run.ckpt, f"the path of a checkpoint: no run in {folder.parent} has saved one yet")
    return max(found, key=lambda path: path.stat().st_mtime)


def _given(run: Run) -> Path:
    path = Path(str(run.ckpt)).expanduser()
    if not path.is_dir() or is_distributed(path):
        return path
    return path / "checkpoints" / ("best.ckpt" if run.evaluate else "last.ckpt")


def is_distributed(path: Path) -> bool:
    """Whether `path` is a folder that torch.distributed.checkpoint has written."""
    return (path / ".metadata").is_file()


def _check_fits(run: Run, path: Path, folder: Path) -> None:
    """ValueError where the config.yaml or summary.json of the checkpoint's run shows that this one can't resume it."""
    earlier = path.resolve().parent.parent
    if not (earlier / CONFIG).exists():
        return  # the checkpoint was moved here
    if earlier == folder.resolve():
        raise refusal("hydra.run.dir", str(folder), "another folder than that of ckpt, whose metrics.csv stays")
    if path.name == "best.ckpt" and not (run.evaluate or isinstance(run.strategy, DistAsync)):
        raise refusal("ckpt", str(path), "last.ckpt, to resume from: best.ckpt holds weights alone, for evaluate=true")
    values = values_of(run)
    try:
        config = yaml.safe_load((earlier / CONFIG).read_text())
        names = {group: config[group]["name"] for group in ("model", "data", "optimizer")}
        fold = config["data"].get("fold")
    except (OSError, yaml.YAMLError, ValueError, TypeError, KeyError) as error:
        raise _unreadable(earlier / CONFIG, error) from error
    for group in ("model", "data") if run.evaluate else names:
        if names[group] != values[group]["name"]:
            allowed = f"{names[group]}, as in ckpt's run (options: {earlier}/.hydra/overrides.yaml)"
            raise refusal(group, values[group]["name"], allowed)
    if (got := values["data"].get("fold")) != fold:  # images to validate with that ckpt's run has trained on
        raise refusal("data.fold", got, f"{json.dumps(fold)}, as in ckpt's run")
    summary = earlier / "summary.json"
    if not run.evaluate and path.name == "last.ckpt" and summary.exists():
        try:
            epochs = int(json.loads(summary.read_text())["epochs"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise _unreadable(summary, error) from error
        if epochs >= run.trainer.max_epochs:
            allowed = f"more than the {epochs} that ckpt has completed"
            raise refusal("trainer.max_epochs", run.trainer.max_epochs, allowed)


def _unreadable(path: Path, error: Exception) -> ValueError:
    return refusal("ckpt", str(path), f"the file of a run, readable: {type(error).__name__}: {error}")
