"""docs/results.csv and what the pages show of it: accuracy over seeds, bytes and time, by network and method.

    gradcomp -m recipe=digits compressor=none,dgc seed=0,1,2,3,4 hydra.sweep.dir=runs/resnet18   # and so on
    python -m benchmarks.results runs && python -m benchmarks.figures        # into the CSV, and into the pages

    gradcomp recipe=digits_swin compressor=dgc data.fold=1 seed=1                                # cross-validation

The CSV has a line for each run, and keeps those of earlier runs: all of them together take some five hours. A run
takes the line of an earlier one of the same network, method, ranks, steps, fold and seed. Times are those of
docs/run_times.csv (`benchmarks.run_times`): those of runs of several days can't be compared.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from benchmarks import report, run_times
from lightning_gradcomp.app.sizes import human

Key = tuple[str, str]
"""Network and method."""

ORDER = run_times.METHODS
TITLES = {"resnet18": "ResNet-18, SGD", "resnet50": "ResNet-50, SGD", "swin_mini": "Small Swin Transformer, AdamW"}
DIFFERENCE = "difference to dense"
HEAD = ["method", "accuracy, %", DIFFERENCE, "each seed", "bytes sent", "ratio, run", "ratio, last step", "ms a step"]
CSV = Path(__file__).parents[1] / "docs" / "results.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A run that ended; a line of the CSV."""

    model: str
    method: str
    ranks: int
    fold: int | None  # of a cross-validation; None: the fixed split
    seed: int
    correct: int
    images: int
    bytes_sent: int
    dense_bytes: int
    last_ratio: float  # of dense bytes to those sent, in the last step
    steps: int
    machine: str

    @property
    def percent(self) -> float:
        """Validation accuracy."""
        return 100 * self.correct / self.images


def summaries(folder: Path) -> list[dict[str, Any]]:
    """Of all runs beneath `folder` that ended, but those whose ranks had images of their own: that is other data."""
    found = [json.loads(path.read_text()) for path in sorted(folder.rglob("summary.json"))]
    return [summary for summary in found if summary["config"]["data"].get("dirichlet") is None]


def key(summary: dict[str, Any]) -> Key:
    """Of a run: delayed averages are a method of their own, and with an error_decay SparseLoCo."""
    config = summary["config"]
    method = config["compressor"]["name"]
    if config["strategy"]["name"] == "dga":
        method = "dga" if config["strategy"].get("error_decay") is None else "sparseloco"
    return config["model"]["name"], method


def result(summary: dict[str, Any]) -> Result:
    """The line of a run."""
    model, method = key(summary)
    cost = summary["communication"]
    return Result(
        model=model,
        method=method,
        ranks=cost["world_size"],
        fold=summary["config"]["data"].get("fold"),
        seed=summary["config"]["seed"],
        correct=summary["val_correct"],
        images=summary["val_images"],
        bytes_sent=cost["bytes_sent"],
        dense_bytes=cost["dense_bytes"],
        last_ratio=cost["last_step"]["ratio"],
        steps=cost["steps"],
        machine=f"{summary['cpu_cores']} cores of {summary['processor']}, torch {summary['packages']['torch']}",
    )


def read_csv() -> list[Result]:
    """The lines of all runs so far."""
    with CSV.open(newline="") as file:
        return [
            Result(
                model=line["model"],
                method=line["method"],
                ranks=int(line["ranks"]),
                fold=int(line["fold"]) if line["fold"] else None,
                seed=int(line["seed"]),
                correct=int(line["correct"]),
                images=int(line["images"]),
                bytes_sent=int(line["bytes_sent"]),
                dense_bytes=int(line["dense_bytes"]),
                last_ratio=float(line["last_ratio"]),
                steps=int(line["steps"]),
                machine=line["machine"],
            )
            for line in csv.DictReader(file)
        ]


def write_csv(results: Iterable[Result]) -> None:
    """Every run as a line."""
    with CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Result)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, results))


def grouped(results: Iterable[Result]) -> dict[Key, list[Result]]:
    """Network and method -> the runs of all seeds with the fixed split, on two ranks."""
    found: dict[Key, list[Result]] = defaultdict(list)
    for each in results:
        if each.fold is None and each.ranks == 2:
            found[each.model, each.method].append(each)
    return found


def cross_validated(results: Iterable[Result]) -> dict[tuple[str, int, int, str], list[Result]]:
    """Network, ranks, steps and method -> the runs of all folds."""
    found: dict[tuple[str, int, int, str], list[Result]] = defaultdict(list)
    for each in results:
        if each.fold is not None:
            found[each.model, each.ranks, each.steps, each.method].append(each)
    return found


def paired(results: Sequence[Result], dense: Sequence[Result]) -> str:
    """Difference to the dense runs of the same fold and seed, in points.

    Mean ± half of its 95 % interval (number of pairs); none with fewer than two.
    """
    beside = {(each.fold, each.seed): each.percent for each in dense}
    found = [each.percent - beside[each.fold, each.seed] for each in results if (each.fold, each.seed) in beside]
    return f"{report.interval(found)} ({len(found)})" if len(found) > 1 else "—"


def folds(results: Sequence[Result]) -> list[str]:
    """A table of the methods for all runs of a cross-validation; none where there are no such runs."""
    found = cross_validated(results)
    rows = [
        [
            f"{TITLES[model]}, N={ranks}, {steps:,} steps",
            f"`{method}`",
            accuracy(runs),
            "" if method == "none" else paired(runs, found.get((model, ranks, steps, "none"), [])),
            human(mean(each.bytes_sent for each in runs)),
            f"{mean(each.dense_bytes / each.bytes_sent for each in runs):.3g}",
        ]
        for model in TITLES
        for ranks, steps in sorted({key[1:3] for key in found}, key=lambda key: (key[0], -key[1]))
        for method in (*ORDER, "sparseloco")
        if (runs := found.get((model, ranks, steps, method)))
    ]
    head = ["network", "method", "accuracy, %", DIFFERENCE, "bytes sent", "ratio, run"]
    return [f"### Cross-validation\n\n{report.table(head, rows)}"] if rows else []


def accuracy(results: Sequence[Result]) -> str:
    """In %, as mean ± standard deviation (number of seeds)."""
    accuracies = [each.percent for each in results]
    spread = f" ± {stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
    return f"{mean(accuracies):.2f}{spread} ({len(accuracies)})"


def row(method: str, results: Sequence[Result], dense: Sequence[Result], step_ms: Sequence[float]) -> list[str]:
    """A line of the table of a network."""
    return [
        f"`{method}`",
        accuracy(results),
        "" if method == "none" else paired(results, dense),
        " ".join(f"{each.percent:.2f}" for each in results),
        human(mean(each.bytes_sent for each in results)),
        f"{mean(each.dense_bytes / each.bytes_sent for each in results):.3g}",
        "rounds" if method == "dga" else f"{results[0].last_ratio:.3g}",
        f"{median(step_ms):.0f}" if step_ms else "—",
    ]


def tables(results: Sequence[Result]) -> str:
    """A table for each network: docs/results.md."""
    found, times = grouped(results), run_times.read_csv()
    parts = [f"Measured on {'; '.join(sorted({each.machine for each in results}))}."]
    for model, title in TITLES.items():
        dense = found.get((model, "none"), [])
        rows = [row(m, found[model, m], dense, times[model, m]) for m in ORDER if (model, m) in found]
        parts.append(f"### {title}\n\n{report.table(HEAD, rows)}")
    return "\n\n".join([*parts, *folds(results)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", help="folders; runs are found however deep they lie in them")
    new = [result(summary) for folder in parser.parse_args().runs for summary in summaries(folder)]
    by_run = {
        (each.model, each.method, each.ranks, each.steps, -1 if each.fold is None else each.fold, each.seed): each
        for each in [*read_csv(), *new]
    }
    results = [by_run[run] for run in sorted(by_run)]
    write_csv(results)
    print(tables(results))


if __name__ == "__main__":
    main()
