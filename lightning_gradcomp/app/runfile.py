"""config.yaml in a run's folder: what the command line hands to the training process, and what a reader finds later."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from lightning_gradcomp.app.config import OPTIMIZERS, STRATEGIES, Data, Logger, Model, Run, Trainer, name_of
from lightning_gradcomp.registry import entries

NAME = "config.yaml"


def named(run: Run) -> dict[str, Any]:
    """The run as plain values, each choice with its name."""
    values = asdict(run)
    for group in ("compressor", "strategy", "optimizer"):
        values[group] = {"name": name_of(getattr(run, group))} | values[group]
    return values


def save(run: Run, folder: Path) -> None:
    """Write `run` to config.yaml in `folder`."""
    (folder / NAME).write_text(yaml.safe_dump(named(run), sort_keys=False))


def load(folder: Path) -> Run:
    """The run whose config.yaml is in `folder`.

    Raises:
        ValueError: an option that its class refuses.
    """
    values: dict[str, Any] = yaml.safe_load((folder / NAME).read_text())
    compressors: dict[str, type] = {entry.name: entry.cls for entry in entries()}
    return Run(
        seed=values["seed"],
        topology=values["topology"],
        inside=values["inside"],
        residual_device=values["residual_device"],
        model=Model(**values["model"]),
        data=Data(**values["data"]),
        compressor=compressors[values["compressor"].pop("name")](**values["compressor"]),
        strategy=STRATEGIES[values["strategy"].pop("name")](**values["strategy"]),
        optimizer=OPTIMIZERS[values["optimizer"].pop("name")](**values["optimizer"]),
        trainer=Trainer(**values["trainer"]),
        logger=Logger(**values["logger"]),
    )
