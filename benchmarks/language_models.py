"""docs/data/text.csv, one line per run of a language model, and text_curves.csv, its loss after each epoch.

    gradcomp -m recipe=stdlib_gpt compressor=none,dgc_int8 seed=0,1,2,3,4 hydra.sweep.dir=runs/text     # and so on
    python -m benchmarks.results runs/text && python -m docs.tables && python -m docs.pictures

A run replaces an earlier one with the same method, optimizer, ranks, steps, seed and machine.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import pandas as pd

from benchmarks import report, summaries
from benchmarks.summaries import Summary

CSV = report.DATA / "text.csv"
CURVES = report.DATA / "text_curves.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A finished run; a line of text.csv."""

    method: str
    optimizer: str
    ranks: int
    seed: int
    steps: int
    val_loss: float  # nats per byte, at the end
    bytes_sent: int
    dense_bytes: int
    machine: str

    @property
    def sample(self) -> int:
        return self.seed

    @property
    def value(self) -> float:
        return self.val_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A run after one of its epochs; a line of text_curves.csv."""

    method: str
    optimizer: str
    ranks: int
    seed: int
    steps: int  # of the whole run
    step: int
    bytes_sent: int  # by rank 0 so far
    val_loss: float


def result(summary: Summary) -> Result:
    """The line of a run."""
    config, cost = summary["config"], summary["communication"]
    return Result(
        method=summaries.method(config),
        optimizer=summaries.optimizer(config),
        ranks=cost["world_size"],
        seed=config["seed"],
        steps=cost["steps"],
        val_loss=round(summary["val_loss"], 6),
        bytes_sent=cost["bytes_sent"],
        dense_bytes=cost["dense_bytes"],
        machine=summaries.machine(summary),
    )


def points(folder: Path, run: Result) -> Iterator[Point]:
    """The curve of a run."""
    for row in pd.read_csv(folder / "metrics.csv").dropna(subset="val_loss").to_dict("records"):
        yield Point(
            method=run.method,
            optimizer=run.optimizer,
            ranks=run.ranks,
            seed=run.seed,
            steps=run.steps,
            step=row["step"] + 1,
            bytes_sent=int(row["comm/total_bytes_sent"]),
            val_loss=round(row["val_loss"], 4),
        )


def record(runs: Iterable[tuple[Path, Summary]]) -> None:
    """Add runs of language models and their curves. There must be at least one."""
    results = [(folder, result(summary)) for folder, summary in runs]
    record_results([run for _, run in results])
    curves = [point for folder, run in results for point in points(folder, run)]
    report.record(CURVES, curves, _place)


def record_results(results: Sequence[Result], csv: Path | None = None) -> None:
    """Add lines to text.csv, or to another file of runs. There must be at least one."""
    report.record(csv or CSV, results, _identity)


def _identity(each: Result) -> tuple[str, str, int, int, int, str]:
    return each.method, each.optimizer, each.ranks, each.steps, each.seed, each.machine


def _place(each: Point) -> tuple[str, str, int, int, int, int]:
    return each.method, each.optimizer, each.ranks, each.steps, each.seed, each.step


def read_csv() -> list[Result]:
    """The lines of all runs so far."""
    return report.read(CSV, Result)


RANKS, STEPS = (2, 8), 600
"""Of the runs in the page's table."""
LONG = (300, 600, 1200, 2400, 4800, 9600)
"""Steps of the runs that are compared by length."""
HEAD = ("method", "2 ranks", "8 ranks", "fewer bytes")


def table() -> str:
    """The page's table: a row per optimizer and method, compared with dense runs on each number of ranks."""
    found: dict[str, dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for each in (each for each in read_csv() if each.steps == STEPS):
        found[each.optimizer][each.method].append(each)
    rows = []
    for optimizer, methods in sorted(found.items()):
        for method in sorted({*methods} - {"none"}, key=summaries.place):
            compared = []
            for ranks in RANKS:
                runs, dense = ([each for each in methods[name] if each.ranks == ranks] for name in (method, "none"))
                compared.append(summaries.compared(runs, dense, 3))
            words = [summaries.code(method) + (" (Muon)" if optimizer == "Muon" else "")]
            words += [each.difference for each in compared]
            rows.append([*words, summaries.joined(each.fewer for each in compared)])
    return report.table(HEAD, rows)


def difference(method: str, ranks: int, steps: int = STEPS) -> str:
    """Loss of AdamW with a method minus dense; a dash if there is no run."""
    return summaries.compared(*with_dense(method, ranks).get(steps, ([], [])), 3).difference or "—"


def by_length(method: str, ranks: int) -> dict[int, float]:
    """Steps of a run -> loss of AdamW with a method minus dense, mean over the seeds that both have."""
    return {steps: mean(report.differences(*both)) for steps, both in sorted(with_dense(method, ranks).items())}


LENGTHS = ("int8", "eden", "eden bits=2", "dgc dense_values=int8", "onebit", "powersgd")
"""Methods whose loss is compared by the length of the run."""


def lengths() -> str:
    """The page's table: a row per method and number of ranks, differences to dense by the number of steps.

    Of one or two seeds, each difference; of more, their mean and its interval.
    """
    rows = []
    for method, ranks in itertools.product(LENGTHS, RANKS):
        found, cells = with_dense(method, ranks), []
        for steps in LONG:
            each = report.differences(*found.get(steps, ([], [])))
            cells.append(report.interval(each, 3) if len(each) > 2 else ", ".join(f"{one:+.3f}" for one in each))
        rows.append([summaries.code(method), ranks, *cells])
    return report.table(["method", "ranks", *(f"{steps:,} steps" for steps in LONG)], rows)


def with_dense(method: str, ranks: int) -> dict[int, tuple[list[Result], list[Result]]]:
    """Steps of a run -> those of AdamW with a method, and the dense ones to pair them with."""
    own: dict[int, list[Result]] = defaultdict(list)
    dense: dict[int, list[Result]] = defaultdict(list)
    for each in (each for each in read_csv() if (each.optimizer, each.ranks) == ("AdamW", ranks)):
        if each.method == "none":
            dense[each.steps].append(each)
        elif each.method == method:
            own[each.steps].append(each)
    return {steps: (runs, dense[steps]) for steps, runs in own.items()}


FINETUNED = {"finetune": "all parameters", "finetune_head": "the last layers"}
"""File of runs of recipe=finetune_text -> what trains."""


def finetuned() -> str:
    """The page's table of fine-tuning: a row per method, differences to dense, two ranks."""
    rows: dict[str, list[str]] = defaultdict(list)
    for file in FINETUNED:
        by_method: dict[str, list[Result]] = defaultdict(list)
        for each in report.read(report.DATA / f"{file}.csv", Result):
            by_method[each.method].append(each)
        for method in sorted({*by_method} - {"none"}, key=summaries.place):
            cells = summaries.compared(by_method[method], by_method["none"], 3)
            rows[summaries.code(method)] += [cells.difference, cells.fewer]
    head = [word for trained in FINETUNED.values() for word in (trained, "fewer bytes")]
    return report.table(["method", *head], [[method, *cells] for method, cells in rows.items()])


def curve(method: str, optimizer: str, steps: int) -> list[tuple[float, float]]:
    """(bytes sent, loss) of two ranks after each epoch, means over seeds; empty if there is no run."""
    wanted = (method, optimizer, 2, steps)
    found: dict[int, list[Point]] = defaultdict(list)
    for each in report.read(CURVES, Point):
        if (each.method, each.optimizer, each.ranks, each.steps) == wanted:
            found[each.step].append(each)
    return [
        (mean(each.bytes_sent for each in ps), mean(each.val_loss for each in ps)) for _, ps in sorted(found.items())
    ]
