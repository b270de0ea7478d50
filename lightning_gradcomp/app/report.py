"""`gradcomp report`: a page with a table and figures on one or more runs, from the files in their folders."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from omegaconf import OmegaConf

from lightning_gradcomp.app.summary import human, short
from lightning_gradcomp.errors import refusal

OPTIONS = "RUN..., folders of runs or of sweeps; --out FOLDER"
STEPS, MEGABYTES, SECONDS = "optimizer steps", "MB of gradients sent by a rank", "seconds"
FIGURES = {
    "accuracy": ("val_acc", "validation accuracy"),
    "validation_loss": ("val_loss", "validation loss"),
    "loss": ("train_loss", "training loss"),
}
"""Name of a figure -> its column of metrics.csv and the axis label."""
RESULTS = {
    "val_acc": ("accuracy, %", 100, "{:.2f}"),
    "val_loss": ("loss, nats", 1, "{:.4f}"),
    "val_bits_per_byte": ("bits per byte", 1, "{:.4f}"),
}
"""Entry of summary.json -> its column of the table, factor and format. The table has those of its runs."""

IGNORED = ("seed", "folder", "ckpt", "trainer.devices", "trainer.num_nodes", "trainer.log_every_n_steps")
IGNORED += ("trainer.enable_progress_bar",)
"""Options that don't separate groups of runs, like those of the logger. The number of ranks does, however it is set."""

NOTES = """\
Accuracy and loss are those of the last validation. Groups of several runs show mean ± standard deviation; so do the
bands in the figures. Bytes are those of the gradients that left rank 0. The ratio is what an uncompressed ring
all-reduce of N ranks would have sent in the whole run, divided by what was sent. Milliseconds are the sum of each
phase's median."""


def main(words: list[str]) -> int:
    """Write the report that `words` ask for and print its path."""
    parser = argparse.ArgumentParser(
        prog="gradcomp report", description="Writes report.md with figures on one run, or compares several."
    )
    parser.add_argument("runs", metavar="RUN", nargs="*", type=Path, help="a run's folder, or one with runs beneath it")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="default: the run's folder; ./report for several")
    given, rest = parser.parse_known_args(words)
    if rest or not given.runs:
        raise refusal("gradcomp report", " ".join(rest) or "nothing", OPTIONS)
    print(write(given.runs, given.out))
    return 0


def write(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write report.md, with figures/*.png next to it, on all runs in or below `folders`. Returns its path.

    `out` is the report's folder. Default: that of the run, or ./report for several.
    """
    runs = find(folders)
    out = out or (runs[0].folder if len(runs) == 1 else Path("report"))
    (out / "figures").mkdir(parents=True, exist_ok=True)
    groups, names = grouped(runs), []
    for name, (column, title) in FIGURES.items():
        if figure := draw(groups, column, title):
            figure.savefig(out / "figures" / f"{name}.png", dpi=150)
            names.append(name)
    path = out / "report.md"
    path.write_text(page(groups, names))
    return path


@dataclass(frozen=True)
class FinishedRun:
    """A finished run."""

    folder: Path
    options: dict[str, Any]  # those in config.yaml, named as on the command line
    summary: dict[str, Any]  # contents of summary.json
    metrics: pd.DataFrame  # rows of metrics.csv; of a resumed run, those since it was resumed

    @property
    def cost(self) -> dict[str, Any]:
        """What CommunicationMonitor counted."""
        return self.summary["communication"]

    @property
    def world(self) -> int:
        """N."""
        return self.cost["world_size"]

    @property
    def key(self) -> str:
        """A key shared by runs that differ only in the seed."""
        options = {name: value for name, value in self.options.items() if tells(name)}
        return json.dumps([self.world, options], sort_keys=True, default=str)

    def name(self, part: str) -> str:
        """Class or function of a part of the config, such as `DGC`; for torchvision and timm, the model's name."""
        return self.options.get(f"{part}.name") or short(self.options[f"{part}._target_"])


def find(folders: Iterable[Path]) -> list[FinishedRun]:
    """All finished runs in or below `folders`. Names unfinished ones on stderr."""
    found: dict[Path, FinishedRun | None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise refusal("RUN", str(folder), "a folder that exists")
        for path in sorted(folder.resolve().rglob("metrics.csv"), key=_by_number):
            found[path.parent] = read(path.parent) if (path.parent / "summary.json").exists() else None
    runs = [run for run in found.values() if run]
    if not runs:
        allowed = "a run that has ended: its folder has metrics.csv (logger=csv) and summary.json"
        raise refusal("RUN", ", ".join(map(str, folders)), allowed)
    for folder in [folder for folder, run in found.items() if run is None]:
        print(f"gradcomp: left out of the report because it has not finished: {folder}", file=sys.stderr)
    return runs


def _by_number(path: Path) -> list[int | str]:
    return [int(word) if word.isdigit() else word for word in re.split(r"(\d+)", str(path))]  # 10 comes after 9


def read(folder: Path) -> FinishedRun:
    """The finished run in `folder`."""
    try:
        options = dict(_flat(OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))))
        summary = json.loads((folder / "summary.json").read_text())
        rows = pd.read_csv(folder / "metrics.csv")
        axes = {STEPS: rows["step"] + 1, MEGABYTES: rows["comm/total_bytes_sent"] / 1e6, SECONDS: rows["time/total_s"]}
        return FinishedRun(folder, options, summary, rows.assign(**axes))
    except Exception as error:
        raise ValueError(f"{folder} can't be read: {type(error).__name__}: {error}") from error


def _flat(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def tells(option: str) -> bool:
    """True if the option may change the result."""
    return option not in IGNORED and not option.startswith("logger.")


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed: a row of the table, a line in the figures."""

    runs: list[FinishedRun]
    method: str  # class names of compressor and strategy
    options: list[str]  # those in which it differs from the other groups, as on the command line

    @property
    def label(self) -> str:
        """Method and options."""
        return " ".join([self.method, *self.options])

    def curve(self, x: str, y: str) -> pd.DataFrame:
        """Columns x, mean and sd of y, at the steps common to all runs."""
        rows = pd.concat([run.metrics.reindex(columns=["step", x, y]).dropna() for run in self.runs]).groupby("step")
        points = pd.DataFrame({x: rows[x].mean(), "mean": rows[y].mean(), "sd": rows[y].std().fillna(0)})
        return points[rows.size() == len(self.runs)]


def grouped(runs: list[FinishedRun]) -> list[Group]:
    """The groups, ordered by their first runs."""
    by_key: dict[str, list[FinishedRun]] = {}
    for run in runs:
        by_key.setdefault(run.key, []).append(run)
    firsts = [each[0] for each in by_key.values()]
    several_worlds = len({run.world for run in firsts}) > 1
    groups = []
    for each in by_key.values():
        strategy = each[0].name("strategy")
        method = each[0].name("compressor") + (f" {strategy}" if strategy != "CompressedDDPStrategy" else "")
        words = list(_differing(each[0].options, [run.options for run in firsts]))
        groups.append(Group(each, method, words + [f"N={each[0].world}"] * several_worlds))
    return groups


def _differing(own: dict[str, Any], others: list[dict[str, Any]]) -> Iterator[str]:
    """The options that differ from those of the runs with the same class in that place."""
    for name, value in own.items():
        place, _, leaf = name.rpartition(".")
        kind = f"{place}._target_"
        peers = [other for other in others if leaf == "_target_" or other.get(kind) == own.get(kind)]
        if not tells(name) or all(other.get(name) == value for other in peers):
            continue
        if leaf != "_target_":
            yield f"{name}={json.dumps(value, separators=(',', ':'), default=str)}".replace('"', "")
        elif place not in ("compressor", "strategy"):  # the method names these
            yield f"{place}={short(value)}"


def draw(groups: list[Group], column: str, title: str) -> Figure | None:
    """Plot a column of metrics.csv over steps, megabytes and seconds; None if no run has it."""
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    panels = dict(zip((STEPS, MEGABYTES, SECONDS), figure.subplots(1, 3, sharey=True), strict=True))
    lines = {}
    for x, axes in panels.items():
        for number, group in enumerate(groups):
            points = group.curve(x, column)
            if points.empty or (x == MEGABYTES and group.runs[0].world == 1):
                continue
            colour, style = f"C{number % 10}", ("-", "--", ":", "-.")[number // 10 % 4]
            [lines[group.label]] = axes.plot(points[x], points["mean"], style, color=colour, marker=".")
            band = points["mean"] - points["sd"], points["mean"] + points["sd"]
            axes.fill_between(points[x], *band, color=colour, alpha=0.2, linewidth=0)
        axes.set_xlabel(x)
        axes.grid(alpha=0.3)
    if not lines:
        return None
    panels[STEPS].set_ylabel(title)
    if len(groups) > 1 and panels[MEGABYTES].lines:
        panels[MEGABYTES].set_xscale("log")
        panels[MEGABYTES].xaxis.set_major_formatter(LogFormatter())
        panels[MEGABYTES].xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    columns = max(1, min(len(lines), 150 // (max(map(len, lines)) + 8)))
    figure.legend(
        list(lines.values()), [each.replace("$", r"\$") for each in lines], loc="outside lower center", ncols=columns
    )
    return figure


def page(groups: list[Group], figures: list[str]) -> str:
    """The text of report.md, given the names of the `figures`."""
    runs = [run for group in groups for run in group.runs]
    subjects = _each(f"{run.name('model')} on {run.name('data')}" for run in runs)
    parts = [f"# {subjects}: {groups[0].method if len(groups) == 1 else f'{len(groups)} configurations'}"]
    facts = {
        "Optimizer": _each(f"{run.name('optimizer')}, {run.summary['epochs']:g} epochs" for run in runs),
        "Hardware": _each(map(_hardware, runs)),
        "Versions": _each(f"{name} {number}" for run in runs for name, number in run.summary["packages"].items()),
    }
    parts.append("\n".join(f"- {name}: {fact}" for name, fact in facts.items()))
    results = [name for name in RESULTS if any(name in run.summary for run in runs)]
    cells = [_row(group, results) for group in groups]
    rows = [list(cells[0]), ["---"] * len(cells[0]), *(list(row.values()) for row in cells)]
    parts += ["\n".join(f"| {' | '.join(row)} |" for row in rows), NOTES.replace("\n", " ")]
    parts += [f"![{FIGURES[name][1]}](figures/{name}.png)" for name in figures]
    places = [f"- `{group.label}`: `{run.folder}`" for group in groups for run in group.runs]
    parts.append("Runs:\n\n" + "\n".join(places))
    return "\n\n".join(parts) + "\n"


def _each(words: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(words))


def _hardware(run: FinishedRun) -> str:
    device, cores, processor = (run.summary[key] for key in ("device", "cpu_cores", "processor"))
    nodes, ranks = run.summary["nodes"], run.summary["devices_per_node"]
    return f"{device}, {cores} cores of {processor}; {nodes} node{'s' * (nodes > 1)} with {ranks} ranks"


def _row(group: Group, results: list[str]) -> dict[str, str]:
    """Column -> cell, with a column for each of the `results`."""
    runs, found = group.runs, {}
    for name in results:
        title, factor, form = RESULTS[name]
        values = [factor * run.summary[name] for run in runs if name in run.summary]
        found[title] = _spread(values, form) if values else ""
    return {
        "method": group.method,
        "options": f"`{' '.join(group.options)}`".replace("|", r"\|") if group.options else "",
        "runs (seeds)": f"{len(runs)} ({', '.join(str(run.options['seed']) for run in runs)})",
        "N": str(runs[0].world),
        **found,
        "sent by a rank": human(sum(run.cost["totals"]["bytes_sent"] for run in runs) / len(runs)),
        "ratio": _digits(sum(run.cost["totals"]["ratio"] for run in runs) / len(runs)),
        "topology": _each(run.cost.get("topology", "rounds") for run in runs),
        "ms a step": _spread([sum(run.cost["milliseconds"].values()) for run in runs], "{:.0f}"),
    }


def _digits(number: float) -> str:
    """A number with three significant digits, or all those before the decimal point.

    >>> _digits(2135.4), _digits(8.5432)
    ('2,135', '8.54')
    """
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def _spread(values: list[float], form: str) -> str:
    """Mean ± standard deviation of two or more values; a single value as it is."""
    series = pd.Series(values)
    return form.format(series.mean()) + (f" ± {form.format(series.std())}" if len(values) > 1 else "")
