"""config.yaml in a run's folder: what the command line hands to the training process, and what a reader finds later."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from lightning_gradcomp.app.config import ONE_CLASS, Run, classes, name_of

NAME = "config.yaml"


def named(run: Run) -> dict[str, Any]:
    """The run as plain values, each choice with its name."""
    values: dict[str, Any] = asdict(run)
    for group in classes():
        values[group] = {"name": name_of(group, getattr(run, group))} | values[group]
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
    for group, choices in classes().items():
        values[group] = choices[values[group].pop("name")](**values[group])
    for group, cls in ONE_CLASS.items():
        values[group] = cls(**values[group])
    return Run(**values)
