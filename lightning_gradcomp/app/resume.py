"""Which checkpoint `ckpt=...` means, and whether it fits. Neither torch nor Lightning is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from lightning_gradcomp.app import ranks, runfile
from lightning_gradcomp.app.config import Run
from lightning_gradcomp.errors import refusal


def resolve(run: Run, folder: Path, *, sweep: bool) -> None:
    """Replace `run.ckpt` by the path of a file, for a run that writes into `folder`.

    Raises:
        ValueError: there is no such checkpoint, or it doesn't fit the run.
    """
    if run.ckpt is None:
        return
    path = _newest(run, folder, sweep) if run.ckpt in ("last", "best") else _given(run)
    if not path.is_file():
        raise refusal("ckpt", run.ckpt, "last, best, the folder of a run that has saved a checkpoint, or a .ckpt file")
    _check(run, path, folder)
    run.ckpt = str(path.resolve())


def _newest(run: Run, folder: Path, sweep: bool) -> Path:
    """The newest one beside `folder`."""
    if run.ckpt == "best" and not run.evaluate:
        raise refusal("ckpt", "best", "last, to go on from: best.ckpt holds weights alone, for evaluate=true")
    if sweep or ranks.started_elsewhere():
        raise refusal("ckpt", run.ckpt, "the path of a checkpoint, in sweeps and where torchrun or SLURM starts ranks")
    name = f"checkpoints/{run.ckpt}.ckpt"
    found = [*folder.parent.glob(f"*/{name}"), *folder.parent.glob(f"*/*/{name}")]  # of runs, of sweeps' jobs
    if not found:
        raise refusal("ckpt", run.ckpt, f"the path of a checkpoint: no run in {folder.parent} has saved one yet")
    return max(found, key=lambda path: path.stat().st_mtime)


def _given(run: Run) -> Path:
    path = Path(str(run.ckpt)).expanduser()
    return path / "checkpoints" / ("best.ckpt" if run.evaluate else "last.ckpt") if path.is_dir() else path


def _check(run: Run, path: Path, folder: Path) -> None:
    """ValueError where the run that has written the checkpoint tells that this one can't go on from it."""
    earlier = path.resolve().parent.parent
    if not (earlier / runfile.NAME).exists():
        return  # moved here from elsewhere
    if earlier == folder.resolve():
        raise refusal("hydra.run.dir", str(folder), "another folder than that of ckpt, whose metrics.csv stays")
    config: dict[str, Any] = yaml.safe_load((earlier / runfile.NAME).read_text())
    now = runfile.named(run)
    for group in ("model", "data") if run.evaluate else ("model", "data", "optimizer"):
        if config[group]["name"] != now[group]["name"]:
            allowed = f"{config[group]['name']}, as in ckpt's run (options: {earlier}/.hydra/overrides.yaml)"
            raise refusal(group, now[group]["name"], allowed)
    if not run.evaluate and path.name == "last.ckpt" and (earlier / "summary.json").exists():
        epochs = json.loads((earlier / "summary.json").read_text())["epochs"]
        if epochs >= run.trainer.max_epochs:
            raise refusal(
                "trainer.max_epochs", run.trainer.max_epochs, f"more than the {epochs} that ckpt has behind it"
            )
