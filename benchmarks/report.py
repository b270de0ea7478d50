"""Reporting shared by the benchmarks: tables, intervals, the machine, and CSV files whose lines are dataclasses."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeVar

import pandas as pd
import torch
from scipy.stats import t

from lightning_gradcomp.app.summary import processor

DATA = Path(__file__).parents[1] / "docs" / "data"
"""The data behind the pages."""

Line = TypeVar("Line")


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
    """Mean ± half its 95 % confidence interval, for two or more differences."""
    rounded = round(mean(differences), digits) + 0.0  # no -0.00
    return f"{rounded:+.{digits}f} ± {half_width(differences):.{digits}f}"


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
