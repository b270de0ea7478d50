"""The tables of docs/results.md from the folders of runs: accuracy over seeds, bytes, and time, by network and method.

    gradcomp -m recipe=digits compressor=none,dgc seed=0,1,2,3,4 hydra.sweep.dir=runs/resnet18   # and so on
    python -m benchmarks.results runs --times quiet --page docs/results.md --csv docs/results.csv

The CSV has a line for each run, and keeps those of earlier runs: all of them together take some five hours.
Times of runs that shared the machine with something else say nothing, so they come from runs of their own (--times):
short ones without a warm-up, made on a quiet machine, one for each network and method.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import report
from lightning_gradcomp.app.sizes import human

Key = tuple[str, str]
"""Network and method."""

ORDER = ("none", "fp16", "bf16", "dgc", "gradient_dropping", "powersgd", "onebit", "terngrad", "twobit", "dga")
TITLES = {"resnet18": "ResNet-18, SGD", "resnet50": "ResNet-50, SGD", "swin_mini": "Small Swin Transformer, AdamW"}
MARKED = re.compile(r"(<!-- runs -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = ["method", "accuracy, %", "each seed", "bytes sent", "ratio, run", "ratio, last step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A run that ended; a line of the CSV."""

    model: str
    method: str
    seed: int
    correct: int
    images: int
    bytes_sent: int
    dense_bytes: int
    last_ratio: float  # of dense bytes to those sent, in the last step
    steps: int
    machine: str


def summaries(folder: Path) -> list[dict[str, Any]]:
    """Of all runs beneath `folder` that ended."""
    return [json.loads(path.read_text()) for path in sorted(folder.rglob("summary.json"))]


def key(summary: dict[str, Any]) -> Key:
    """Of a run: delayed averages are a method of their own."""
    config = summary["config"]
    method = "dga" if config["strategy"]["name"] == "dga" else config["compressor"]["name"]
    return config["model"]["name"], method


def result(summary: dict[str, Any]) -> Result:
    """The line of a run."""
    model, method = key(summary)
    cost = summary["communication"]
    return Result(
        model=model,
        method=method,
        seed=summary["config"]["seed"],
        correct=summary["val_correct"],
        images=summary["val_images"],
        bytes_sent=cost["bytes_sent"],
        dense_bytes=cost["dense_bytes"],
        last_ratio=cost["last_step"]["ratio"],
        steps=cost["steps"],
        machine=f"{summary['cpu_cores']} cores of {summary['processor']}, torch {summary['packages']['torch']}",
    )


def read_csv(path: Path) -> list[Result]:
    """The lines of earlier runs."""
    with path.open(newline="") as file:
        return [
            Result(
                model=line["model"],
                method=line["method"],
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


def write_csv(path: Path, results: Iterable[Result]) -> None:
    """Every run as a line: what the tables are made of."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Result)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, results))


def row(method: str, results: list[Result], timed: dict[str, Any] | None) -> list[str]:
    """A line of the table of a network."""
    accuracies = [100 * each.correct / each.images for each in results]
    spread = f" ± {stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
    times = [f"{sum(timed['communication']['milliseconds'].values()):.0f}"] if timed else []
    return [
        f"`{method}`",
        f"{mean(accuracies):.2f}{spread} ({len(accuracies)})",
        " ".join(f"{accuracy:.2f}" for accuracy in accuracies),
        human(mean(each.bytes_sent for each in results)),
        f"{mean(each.dense_bytes / each.bytes_sent for each in results):.3g}",
        "rounds" if method == "dga" else f"{results[0].last_ratio:.3g}",
        *times,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--times", type=Path, help="a folder of runs on a quiet machine")
    parser.add_argument("--page", type=Path, help="where to put the tables, between <!-- runs --> and <!-- end -->")
    parser.add_argument("--csv", type=Path, help="every run as a line; a run of the same words replaces its line")
    arguments = parser.parse_args()
    earlier = read_csv(arguments.csv) if arguments.csv and arguments.csv.exists() else []
    by_run = {
        (each.model, each.method, each.seed): each for each in [*earlier, *map(result, summaries(arguments.runs))]
    }
    results = [by_run[run] for run in sorted(by_run)]
    found: dict[Key, list[Result]] = defaultdict(list)
    for each in results:
        found[each.model, each.method].append(each)
    timed = {key(summary): summary for summary in summaries(arguments.times)} if arguments.times else {}
    head = [*HEAD, "ms a step"] if timed else HEAD
    parts = [f"Measured on {'; '.join(sorted({each.machine for each in results}))}."]
    for model in dict.fromkeys(model for model, _ in found):
        methods = [method for method in ORDER if (model, method) in found]
        rows = [row(method, found[model, method], timed.get((model, method))) for method in methods]
        parts.append(f"### {TITLES[model]}\n\n{report.table(head, rows)}")
    text = "\n\n".join(parts)
    print(text)
    if arguments.page:
        page = MARKED.sub(lambda marks: f"{marks[1]}{text}\n{marks[2]}", arguments.page.read_text())
        arguments.page.write_text(page)
    if arguments.csv:
        write_csv(arguments.csv, results)


if __name__ == "__main__":
    main()
