"""Runs, read from their folders: config.yaml, metrics.csv and, where a run has ended, summary.json."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
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

NEEDED = {
    "config.yaml": (
        "seed", "topology", "inside", "model.name", "data.name", "data.batch_size", "compressor.name", "strategy.name",
        "optimizer.name", "trainer.max_epochs",
    ),
    "summary.json": (
        *(f"communication.milliseconds.{phase}" for phase in PHASES), "device", "devices_per_node",
        "gpus_per_node", "nodes", "processor", "cpu_cores", "threads_per_process", "python", "packages",
    ),
}  # fmt: skip
"""Entries without which a file is taken for a broken one."""


@dataclass(frozen=True)
class Run:
    """One run, with the rows of the runs that it resumes.

    Args:
        folder: its own.
        config: config.yaml.
        summary: summary.json; None where the run has not ended.
        columns: of metrics.csv: name -> fp64 [rows], NaN where a row has no such value.
        earlier: folders of the runs that it resumes, the last one first.
        missing: the folder of a resumed run that is not there any more.
    """

    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any] | None
    columns: dict[str, np.ndarray]
    earlier: tuple[Path, ...] = ()
    missing: Path | None = None

    def at(self, *names: str) -> list[np.ndarray]:
        """Columns, of those rows that have a value in all of them; empty where there is no such column."""
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
        """Whether the averages were delayed, in rounds."""
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


def find(folders: list[Path]) -> tuple[list[Run], dict[Path, str]]:
    """All runs with a validation in `folders` and beneath them, without those that another of them resumes.

    Returns:
        The runs, and the folders that are left out, with the reason.

    Raises:
        ValueError: a folder that is missing or holds no run, or no run that can be shown.
    """
    places = list(dict.fromkeys(place for folder in folders for place in _places(folder)))
    left_out: dict[Path, str] = {}
    runs = []
    for place in places:
        try:
            runs.append(read(place))
        except ValueError as error:
            left_out[place] = str(error)
    resumed = {folder for run in runs for folder in run.earlier}
    runs = [run for run in runs if run.folder not in resumed]
    validated = [run for run in runs if len(run.at(VALIDATED)[0])]
    left_out |= {run.folder: "it has no validation yet" for run in runs if run not in validated}
    if not validated:
        reasons = "".join(f"; {folder}: {why}" for folder, why in left_out.items())
        raise refusal("RUN", ", ".join(map(str, folders)), f"a run that has completed its first validation{reasons}")
    return validated, left_out


def _places(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise refusal("RUN", str(folder), "a folder that exists")
    found = [path.parent.resolve() for path in folder.rglob("metrics.csv") if (path.parent / "config.yaml").exists()]
    if not found:
        raise refusal("RUN", str(folder), "a folder with config.yaml and metrics.csv (logger=csv) in it or beneath it")
    return sorted(found, key=lambda path: [int(part) if part.isdigit() else part for part in _parts(path)])


def _parts(path: Path) -> list[str]:
    return re.split(r"(\d+)", str(path))  # words and numbers in turn, so that 10 comes after 9


def read(folder: Path, resuming: tuple[Path, ...] = ()) -> Run:
    """The run in `folder`, with the earlier rows of the run whose checkpoint it resumes.

    Args:
        resuming: folders of the runs that resume this one.

    Raises:
        ValueError: a file that is broken, or runs that resume each other; names the file.
    """
    config = _parsed(folder / "config.yaml", yaml.safe_load)
    summary = folder / "summary.json"
    result = _parsed(summary, json.loads) if summary.exists() else None
    columns = _parsed(folder / "metrics.csv", _columns)
    checkpoint = config.get("ckpt")
    before = Path(str(checkpoint)).resolve().parent.parent if checkpoint else folder
    if before == folder:
        return Run(folder, config, result, columns)
    if before in resuming:
        raise ValueError(f"{folder / 'config.yaml'}: its ckpt is of {before}, which resumes this run itself")
    if not (before / "metrics.csv").exists():
        return Run(folder, config, result, columns, missing=before)
    earlier = read(before, (*resuming, folder))
    columns = _joined(earlier.columns, columns)
    return Run(folder, config, result, columns, (before, *earlier.earlier), earlier.missing)


def _parsed(path: Path, parse: Callable[[str], Any]) -> Any:
    """What `parse` makes of the file; ValueError with its name where it can't be read or lacks an entry."""
    try:
        values = parse(path.read_text())
    except (OSError, ValueError, yaml.YAMLError, csv.Error) as error:
        raise ValueError(f"{path} can't be read: {' '.join(str(error).split())}") from error
    for name in NEEDED.get(path.name, ()):
        found = values
        for key in name.split("."):
            if not isinstance(found, dict) or key not in found:
                raise ValueError(f"{path} has no entry {name}")
            found = found[key]
    return values


def _columns(text: str) -> dict[str, np.ndarray]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    rows = list(reader)
    names = reader.fieldnames or ["step"]
    if "step" not in names:
        raise ValueError("there is no column 'step'")
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
