"""docs/data/step_times.csv: steps over slow links, measured by `benchmarks.step_time --record`, and their table."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.report import table

CSV = Path(__file__).parents[1] / "docs" / "data" / "step_times.csv"
COMPUTATION = "compute"
TITLES = {COMPUTATION: "computation alone", "ddp": "DDP", "fp16_hook": "fp16_hook", "powersgd_hook": "powersgd_hook"}
HEAD = ["method", "100 Mbit/s", "1 Gbit/s", "bytes sent", "compress, exchange, decompress"]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A line of the CSV: medians of a method over a link of one rate, of the slower rank, in milliseconds."""

    rate_mbit: int
    method: str
    ms: float
    compute_ms: float  # of computation alone, in the same run
    bytes_sent: int | None  # None where nobody counts them: computation, DDP, torch's hooks
    compress_ms: float | None
    exchange_ms: float | None
    decompress_ms: float | None
    machine: str

    @property
    def ratio(self) -> str:
        """The step's time over that of its computation: three digits."""
        return digits(self.ms / self.compute_ms)


def digits(ratio: float, number: int = 3) -> str:
    """`number` digits, with zeros at the end.

    >>> digits(1.4), digits(31.07), digits(31.07, 2)
    ('1.40', '31.1', '31')
    """
    return f"{ratio:#.{number}g}".rstrip(".")


def read_csv() -> list[StepTime]:
    """All lines."""
    with CSV.open(newline="") as file:
        return [
            StepTime(
                rate_mbit=int(line["rate_mbit"]),
                method=line["method"],
                ms=float(line["ms"]),
                compute_ms=float(line["compute_ms"]),
                bytes_sent=int(line["bytes_sent"]) if line["bytes_sent"] else None,
                compress_ms=float(line["compress_ms"]) if line["compress_ms"] else None,
                exchange_ms=float(line["exchange_ms"]) if line["exchange_ms"] else None,
                decompress_ms=float(line["decompress_ms"]) if line["decompress_ms"] else None,
                machine=line["machine"],
            )
            for line in csv.DictReader(file)
        ]


def record(new: Iterable[StepTime]) -> None:
    """Add lines; one replaces an earlier one of the same link and method."""
    by_method = {(each.rate_mbit, each.method): each for each in [*(read_csv() if CSV.exists() else []), *new]}
    with CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(StepTime)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(by_method[key]) for key in sorted(by_method))


def tables(lines: Iterable[StepTime]) -> str:
    """The table in docs/performance.md, the quickest over 1 Gbit/s first."""
    found = {(each.rate_mbit, each.method): each for each in lines}
    methods = sorted({method for _, method in found}, key=lambda m: found[1000, m].ms / found[1000, m].compute_ms)
    rows = []
    for method in methods:
        slow, quick = found.get((100, method)), found[1000, method]
        name, at, _ = method.partition("@")
        phases = (quick.compress_ms, quick.exchange_ms, quick.decompress_ms)
        rows.append(
            [
                TITLES.get(method, f"`{name}`") + (", as a strategy" if at else ""),
                *(_cell(each) if each else "—" for each in (slow, quick)),
                f"{quick.bytes_sent:,}" if quick.bytes_sent else "",
                ", ".join(f"{ms:.0f}" for ms in phases if ms is not None),
            ]
        )
    machines = "; ".join(sorted({each.machine for each in found.values()}))
    return f"{table(HEAD, rows)}\n\nMeasured on {machines}."


def _cell(step: StepTime) -> str:
    return f"{step.ms:.0f}" + ("" if step.method == COMPUTATION else f" ({step.ratio}x)")
