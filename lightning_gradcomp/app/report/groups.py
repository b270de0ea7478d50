"""Groups of runs that differ in nothing but the seed: a group is one line in a figure, and one row in the table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_gradcomp.app.redaction import redacted
from lightning_gradcomp.app.report.runs import PHASES, Run

WITHOUT_EFFECT = ("seed", "ckpt", "trainer.enable_progress_bar", "trainer.log_every_n_steps")
"""Options that change a result by chance alone, or not at all; as are those of the logger."""

NAMES = ("compressor.name", "strategy.name")
"""Options that every label has."""

RANKS = ("trainer.devices", "trainer.num_nodes")
"""Options that N sums up."""


@dataclass(frozen=True)
class Curve:
    """One quantity over another: fp64 [points] each. `low` and `high`: the extremes over the runs."""

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def complement(self) -> Curve:
        """Of 1 - y."""
        return Curve(self.x, 1 - self.y, 1 - self.high, 1 - self.low)


@dataclass(frozen=True)
class Group:
    """Finished runs of one configuration, or one that is not finished."""

    label: str
    runs: list[Run]

    @property
    def world(self) -> int:
        """N."""
        return self.runs[0].world

    @property
    def ratio_name(self) -> str:
        """The column of the ratio."""
        return self.runs[0].ratio_name

    @property
    def milliseconds(self) -> dict[str, float]:
        """Of a step, by phase: means over the runs of their medians."""
        each = [run.milliseconds for run in self.runs]
        return {phase: float(np.mean([run[phase] for run in each])) for phase in PHASES}

    def curve(self, x: str, y: str) -> Curve:
        """Column y over column x, both means over the runs, at the steps that all runs have both of."""
        found = [{step: point for step, *point in zip(*run.at("step", x, y), strict=True)} for run in self.runs]
        steps = sorted(set.intersection(*map(set, found)))
        points = np.array([[each[step] for step in steps] for each in found]).reshape(len(found), -1, 2)
        xs, ys = points[..., 0], points[..., 1]
        return Curve(xs.mean(0), ys.mean(0), ys.min(0), ys.max(0))


def grouped(runs: list[Run]) -> list[Group]:
    """The groups, in order of their first runs; a label names the compressor and the options that differ."""
    by_options: dict[str, list[Run]] = {}
    for run in runs:
        by_options.setdefault(_key(run), []).append(run)
    options = [dict(_flat(each[0].config)) for each in by_options.values()]
    worlds = [each[0].world for each in by_options.values()]
    labels = []
    for own, world in zip(options, worlds, strict=True):
        strategy = str(own["strategy.name"])
        words = [*([strategy] if strategy != "ddp" else []), str(own["compressor.name"])]
        words += [_words(name, value) for name, value in own.items() if _tells(name, own, options, worlds)]
        labels.append(redacted(" ".join(words + [f"N={world}"] * (len(set(worlds)) > 1))))
    return [Group(_marked(label, each[0]), each) for label, each in zip(labels, by_options.values(), strict=True)]


def _marked(label: str, run: Run) -> str:
    return label if run.summary else f"{label} seed={run.config['seed']} (not finished)"


def _key(run: Run) -> str:
    options = {name: value for name, value in _flat(run.config) if _has_effect(name)}
    return json.dumps([options, run.world, None if run.summary else str(run.folder)], sort_keys=True, default=str)


def _has_effect(name: str) -> bool:
    return name not in WITHOUT_EFFECT and not name.startswith("logger.")


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _tells(name: str, own: dict[str, Any], options: list[dict[str, Any]], worlds: list[int]) -> bool:
    """Whether the option differs among the groups that have chosen the same compressor, strategy or optimizer."""
    if not _has_effect(name) or name in NAMES or (name in RANKS and len(set(worlds)) > 1):
        return False
    chosen = f"{name.partition('.')[0]}.name"
    peers = [other for other in options if name in other and (chosen == name or other.get(chosen) == own.get(chosen))]
    return any(other[name] != own[name] for other in peers)


def _words(name: str, value: Any) -> str:
    group, _, leaf = name.rpartition(".")
    return str(value) if leaf == "name" and group else f"{leaf}={'null' if value is None else value}"
