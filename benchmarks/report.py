"""Reporting shared by the benchmarks: tables, intervals, the machine, and CSV files whose lines are dataclasses."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Protocol, TypeVar

import pandas as pd
import torch
from scipy.stats import t

from lightning_gradcomp.app.summary import processor

DATA = Path(__file__).parents[1] / "docs" / "data"
"""The data behind the pages."""

Line = TypeVar("Line")

Pair = tuple[float, float]
"""Result of a run and of the dense run that it is compared with."""


class Outcome(Protocol):
    """A run that is compared with a dense one."""

    @property
    def machine(self) -> str: ...

    @property
    def sample(self) -> Hashable:
        """What the run and its dense run have in common, such as the seed."""

    @property
    def value(self) -> float:
        """The result: accuracy in %, or loss."""


def machine() -> str:
    """The hardware and versions used for the measurements."""
    cards = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{os.cpu_count()} cores of {processor()}, {cards}, torch {version('torch')}, {platform.system()}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in [head, ["---"] * len(head), *rows])


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Mean ± standard deviation of two or more values; a single value as it is."""
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def half_width(differences: Sequence[float]) -> float:
    """Half the 95 % confidence interval of the mean by Student's t, for two or more differences."""
    return t.ppf(0.975, len(differences) - 1) * stdev(differences) / len(differences) ** 0.5


def interval(differences: Sequence[float], digits: int = 2) -> str:
    """Mean ± half its 95 % confidence interval; a single difference as it is."""
    rounded = round(mean(differences), digits) + 0.0  # no -0.00
    return f"{rounded:+.{digits}f}" + (f" ± {half_width(differences):.{digits}f}" if len(differences) > 1 else "")


def pairs(runs: Iterable[Outcome], dense: Iterable[Outcome]) -> list[Pair]:
    """Pair runs with the dense ones of the same sample, and of the same machine if there is one.

    A sample run on several machines makes one pair, of the means, because its data are the same on all of them.
    """
    beside: dict[Hashable, list[Outcome]] = defaultdict(list)
    for each in dense:
        beside[each.sample].append(each)
    found: dict[Hashable, list[Pair]] = defaultdict(list)
    for each in runs:
        if others := beside.get(each.sample):
            nearest = [other for other in others if other.machine == each.machine] or others
            found[each.sample].append((each.value, mean(other.value for other in nearest)))
    return [(mean(own for own, _ in each), mean(other for _, other in each)) for each in found.values()]


def differences(runs: Iterable[Outcome], dense: Iterable[Outcome]) -> list[float]:
    """The difference to dense of each of `pairs`."""
    return [own - other for own, other in pairs(runs, dense)]


def read(path: Path, cls: type[Line]) -> list[Line]:
    """All lines, with None for empty cells; an empty list if there is no file."""
    if not path.exists():
        return []
    frame = pd.read_csv(path, dtype_backend="numpy_nullable", float_precision="round_trip")
    return [cls(**line) for line in frame.astype(object).where(frame.notna(), None).to_dict("records")]


def write(path: Path, lines: Iterable[Any]) -> None:
    """Write all lines. There must be at least one."""
    pd.DataFrame(list(lines), dtype=object).to_csv(path, index=False, lineterminator="\n")


def record(path: Path, new: Sequence[Any], key: Callable[[Any], Any]) -> list[Any]:
    """Add lines, replacing earlier ones with the same key. Returns all lines, sorted by key."""
    by_key = {key(each): each for each in [*read(path, type(new[0])), *new]}
    lines = [by_key[each] for each in sorted(by_key)]
    write(path, lines)
    return lines
