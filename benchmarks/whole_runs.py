"""docs/data/time_to_accuracy.csv: whole trainings over slow links, from `benchmarks.time_to_accuracy`, and their table.

python -m benchmarks.time_to_accuracy --rate-mbit 1000 --out runs/1000
python -m benchmarks.whole_runs runs/1000/time_to_accuracy.json && python -m docs.tables && python -m docs.pictures
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from benchmarks import records, report
from benchmarks.step_times import link
from lightning_gradcomp.app.sizes import human

CSV = Path(__file__).parents[1] / "docs" / "data" / "time_to_accuracy.csv"
COMPUTATION = "no_exchange"
TITLES = {
    COMPUTATION: "computation alone",
    "dgc": "`dgc`",
    "powersgd_hook": "torch's PowerSGD hook, rank 4",
    "fp16_hook": "torch's fp16 hook",
    "ddp": "DDP",
}


@dataclass(frozen=True, kw_only=True)
class WholeRun:
    """A line of the CSV."""

    rate_mbit: int
    method: str
    seed: int
    seconds: float  # of the training, validation included
    accuracy: float  # at the end, in %
    bytes_sent: int  # by all nodes, headers and all
    machine: str


def read_csv() -> list[WholeRun]:
    """All lines."""
    return records.read(CSV, WholeRun)


def runs_of(path: Path) -> Iterator[WholeRun]:
    """Those in a time_to_accuracy.json."""
    content = json.loads(path.read_text())
    conditions, machine = content["conditions"], content["machine"]
    for method, each in content["results"].items():
        for seed, curve, sent in zip(conditions["seeds"].split(","), each["curves"], each["sent"], strict=True):
            seconds, accuracy = curve[-1]
            yield WholeRun(
                rate_mbit=round(float(conditions["rate_mbit"])),
                method=method.partition(":")[0],
                seed=int(seed),
                seconds=round(seconds, 1),
                accuracy=round(100 * accuracy, 2),
                bytes_sent=sent,
                machine=machine,
            )


def record(new: Iterable[WholeRun]) -> None:
    """Add lines; one replaces an earlier one of the same link, method and seed."""
    by_run = {(each.rate_mbit, each.method, each.seed): each for each in [*read_csv(), *new]}
    records.write(CSV, [by_run[run] for run in sorted(by_run)])


def seconds(runs: Iterable[WholeRun], method: str, rate_mbit: int) -> float | None:
    """Of a run, the median of the seeds; None where there is none."""
    found = [each.seconds for each in runs if (each.method, each.rate_mbit) == (method, rate_mbit)]
    return median(found) if found else None


def accuracy(runs: Iterable[WholeRun], method: str) -> float:
    """At the end, in %: the mean of all seeds and links."""
    return mean(each.accuracy for each in runs if each.method == method)


def table() -> str:
    """Seconds by link and method, the quickest over 1 Gbit/s first; and what a rank has sent there."""
    runs = read_csv()
    rates, methods = sorted({each.rate_mbit for each in runs}), {each.method for each in runs}
    rows = []
    for method in (method for method in TITLES if method in methods):
        times = [seconds(runs, method, rate) for rate in rates]
        sent = median(each.bytes_sent / 2 for each in runs if (each.method, each.rate_mbit) == (method, 1000))
        alone = method == COMPUTATION  # whose ranks drift apart
        rows.append(
            [
                TITLES[method],
                *("—" if each is None else f"{each:,.0f} s" for each in times),
                "" if alone else f"{accuracy(runs, method):.1f} %",
                "" if alone else human(sent),
            ]
        )
    head = ["method", *map(link, rates), "accuracy at the end", "sent by a rank over 1 Gbit/s"]
    return report.table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", help="what benchmarks.time_to_accuracy has written under --out")
    record(run for path in parser.parse_args().files for run in runs_of(path))
    print(table())


if __name__ == "__main__":
    main()
