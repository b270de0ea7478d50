"""The tables of docs/results.md from the folders of runs: accuracy over seeds, bytes, and time, by network and method.

    gradcomp -m recipe=digits compressor=none,dgc seed=0,1,2,3,4 hydra.sweep.dir=runs/resnet18   # and so on
    python -m benchmarks.results runs --times quiet --page docs/results.md --csv docs/results.csv

Times of runs that shared the machine with something else say nothing, so they come from runs of their own (--times):
short ones without a warm-up, made on a quiet machine, one for each network and method.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import report
from lightning_gradcomp.app.sizes import human

Key = tuple[str, str]
"""Network and method."""

ORDER = ("none", "fp16", "bf16", "dgc", "gradient_dropping", "powersgd", "onebit", "terngrad", "twobit", "dga")
TITLES = {"resnet18": "ResNet-18, SGD", "resnet50": "ResNet-50, SGD", "swin_mini": "Small Swin Transformer, AdamW"}
MARKED = re.compile(r"(<!-- runs -->\n).*?(\n<!-- end -->)", re.DOTALL)
HEAD = ["method", "accuracy, %", "each seed", "bytes sent", "ratio, run", "ratio, last step"]


def key(summary: dict[str, Any]) -> Key:
    """Of a run: delayed averages are a method of their own."""
    config = summary["config"]
    method = "dga" if config["strategy"]["name"] == "dga" else config["compressor"]["name"]
    return config["model"]["name"], method


def runs(folder: Path) -> dict[Key, dict[int, dict[str, Any]]]:
    """Network and method -> seed -> summary.json of that run, wherever beneath `folder` it lies."""
    found: dict[Key, dict[int, dict[str, Any]]] = defaultdict(dict)
    for path in sorted(folder.rglob("summary.json")):
        summary = json.loads(path.read_text())
        found[key(summary)][summary["config"]["seed"]] = summary
    return found


def row(method: str, by_seed: dict[int, dict[str, Any]], timed: dict[str, Any] | None) -> list[str]:
    """A line of the table of a network."""
    summaries = [by_seed[seed] for seed in sorted(by_seed)]
    accuracies = [100 * summary["val_acc"] for summary in summaries]
    spread = f" ± {stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
    costs = [summary["communication"] for summary in summaries]
    last = "rounds" if method == "dga" else f"{costs[0]['last_step']['ratio']:.3g}"
    times = [f"{sum(timed['communication']['milliseconds'].values()):.0f}"] if timed else []
    return [
        f"`{method}`",
        f"{mean(accuracies):.2f}{spread} ({len(accuracies)})",
        " ".join(f"{accuracy:.2f}" for accuracy in accuracies),
        human(mean(cost["bytes_sent"] for cost in costs)),
        f"{mean(cost['ratio'] for cost in costs):.3g}",
        last,
        *times,
    ]


def write_csv(path: Path, found: dict[Key, dict[int, dict[str, Any]]]) -> None:
    """Every run as a line: what the tables are made of."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "method", "seed", "correct", "images", "bytes_sent", "dense_bytes", "steps"])
        for (model, method), by_seed in sorted(found.items()):
            for seed, summary in sorted(by_seed.items()):
                cost = summary["communication"]
                counts = [summary["val_correct"], summary["val_images"]]
                writer.writerow([model, method, seed, *counts, cost["bytes_sent"], cost["dense_bytes"], cost["steps"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--times", type=Path, help="a folder of runs on a quiet machine")
    parser.add_argument("--page", type=Path, help="where to put the tables, between <!-- runs --> and <!-- end -->")
    parser.add_argument("--csv", type=Path, help="where to write every run as a line")
    arguments = parser.parse_args()
    found = runs(arguments.runs)
    timed = runs(arguments.times) if arguments.times else {}
    head = [*HEAD, "ms a step"] if timed else HEAD
    parts = [f"Measured on {report.machine()}."]
    for model in dict.fromkeys(model for model, _ in found):
        rows = []
        for method in ORDER:
            if by_seed := found.get((model, method)):
                quiet = next(iter(timed.get((model, method), {}).values()), None)
                rows.append(row(method, by_seed, quiet))
        parts.append(f"### {TITLES[model]}\n\n{report.table(head, rows)}")
    text = "\n\n".join(parts)
    print(text)
    if arguments.page:
        page = MARKED.sub(lambda marks: f"{marks[1]}{text}{marks[2]}", arguments.page.read_text())
        arguments.page.write_text(page)
    if arguments.csv:
        write_csv(arguments.csv, found)


if __name__ == "__main__":
    main()
