"""Runs as they lie in their folders: config.yaml, metrics.csv and, where a run has ended, summary.json."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lightning_gradcomp.errors import refusal

VALIDATED, SENT, TIME = "val_acc", "comm/total_bytes_sent", "time/total_s"
SPARSITY, RESIDUAL = "comm/sparsity", "memory/residual_to_gradient"
"""Columns of metrics.csv."""

PHASES = ("compute", "compress", "exchange", "decompress")


@dataclass(frozen=True)
class Run:
    """One run, with the rows of those that it goes on from.

    Args:
        folder: its own.
        config: config.yaml.
        summary: summary.json; None where the run has not ended.
        columns: of metrics.csv: name -> fp64 [rows], NaN where a row has no such value.
        earlier: folders of the runs that it goes on from.
        missing: that of one that is not there any more.
    """

    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any] | None
    columns: dict[str, np.ndarray]
    earlier: tuple[Path, ...] = ()
    missing: Path | None = None

    def at(self, *names: str) -> list[np.ndarray]:
        """Columns, of those rows alone that have a value in all of them; empty where there is no such column."""
        empty = np.full(len(self.columns["step"]), np.nan)
        chosen = [self.columns.get(name, empty) for name in names]
        there = np.all([~np.isnan(column) for column in chosen], axis=0)
        return [column[there] for column in chosen]

    def last(self, name: str) -> float:
        """The last value of a column; NaN where there is none."""
        [values] = self.at(name)
        return float(values[-1]) if len(values) else float("nan")

    def highest(self, name: str) -> float:
        """The highest value of a column; -inf where there is none."""
        return float(self.at(name)[0].max(initial=float("-inf")))

    @property
    def ratio_name(self) -> str:
        """The column of the ratio, whose name has N."""
        return next((name for name in self.columns if re.fullmatch(r"comm/ratio_N\d+", name)), "comm/ratio_N1")

    @property
    def world(self) -> int:
        """N."""
        return int(self.ratio_name.rpartition("N")[2])

    @property
    def delayed(self) -> bool:
        """Whether averages arrived late, in rounds."""
        return self.config["strategy"]["name"] == "dga"

    @property
    def ratios(self) -> tuple[float, float | None]:
        """Dense traffic over this run's: of all steps, and of the last one (None for rounds: they are no steps)."""
        if self.delayed or self.world == 1:  # the column is that of all steps so far
            return self.last(self.ratio_name), None if self.delayed else 1.0
        if self.summary:
            communication = self.summary["communication"]
            return communication["totals"]["ratio"], communication["last_step"]["ratio"]
        step, ratio, sent, total = self.at("step", self.ratio_name, "comm/bytes_sent", SENT)
        if not len(step):
            return float("nan"), float("nan")
        return float(ratio[-1] * sent[-1] * (step[-1] + 1) / total[-1]), float(ratio[-1])

    @property
    def milliseconds(self) -> dict[str, float]:
        """Median of a step, by phase: of all steps in summary.json, else of those in metrics.csv."""
        if self.summary:
            return self.summary["communication"]["milliseconds"]
        found = {phase: self.at(f"time/{phase}_ms")[0] for phase in PHASES}
        return {phase: float(np.median(values)) if len(values) else 0.0 for phase, values in found.items()}


def find(folders: list[Path]) -> tuple[list[Run], list[Path]]:
    """All runs with a validation in `folders` and beneath them, without those that another of them goes on from.

    Returns:
        The runs, and the folders of those without a validation.

    Raises:
        ValueError: a folder that is missing or holds no run, or no validation in any.
    """
    places = list(dict.fromkeys(place for folder in folders for place in _places(folder)))
    runs = [read(place) for place in places]
    continued = {folder for run in runs for folder in run.earlier}
    runs = [run for run in runs if run.folder not in continued]
    validated = [run for run in runs if len(run.at(VALIDATED)[0])]
    if not validated:
        raise refusal("RUN", ", ".join(map(str, folders)), "a run that has got as far as its first validation")
    return validated, [run.folder for run in runs if run not in validated]


def _places(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise refusal("RUN", str(folder), "a folder that exists")
    found = [path.parent.resolve() for path in folder.rglob("metrics.csv") if (path.parent / "config.yaml").exists()]
    if not found:
        raise refusal("RUN", str(folder), "a folder with config.yaml and metrics.csv (logger=csv) in it or beneath it")
    return sorted(found, key=lambda path: [int(part) if part.isdigit() else part for part in _parts(path)])


def _parts(path: Path) -> list[str]:
    return re.split(r"(\d+)", str(path))  # words and numbers in turn, so that 10 comes after 9


def read(folder: Path) -> Run:
    """The run in `folder`, with the rows before its first step of the run whose checkpoint it began with."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    summary = folder / "summary.json"
    result = json.loads(summary.read_text()) if summary.exists() else None
    columns = _columns(folder / "metrics.csv")
    checkpoint = config.get("ckpt")
    before = Path(checkpoint).resolve().parents[1] if checkpoint else folder
    if before == folder:
        return Run(folder, config, result, columns)
    if not (before / "metrics.csv").exists():
        return Run(folder, config, result, columns, missing=before)
    earlier = read(before)
    columns = _joined(earlier.columns, columns)
    return Run(folder, config, result, columns, (before, *earlier.earlier), earlier.missing)


def _columns(path: Path) -> dict[str, np.ndarray]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = {"step": None} | dict.fromkeys(rows[0] if rows else ())
    return {name: np.array([float(row[name] or "nan") for row in rows]) for name in names}


def _joined(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    old = before["step"] < np.nanmin(after["step"], initial=np.inf)
    lengths = int(old.sum()), len(after["step"])

    def part(columns: dict[str, np.ndarray], name: str, rows: Any, length: int) -> np.ndarray:
        return columns[name][rows] if name in columns else np.full(length, np.nan)

    return {
        name: np.concatenate([part(before, name, old, lengths[0]), part(after, name, slice(None), lengths[1])])
        for name in {**before, **after}
    }
