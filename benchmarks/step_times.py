"""docs/data/step_times.csv: steps over slow links, measured by `benchmarks.step_time --record`, and their table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import records, report

CSV = Path(__file__).parents[1] / "docs" / "data" / "step_times.csv"
COMPUTATION = "compute"
TITLES = {
    COMPUTATION: "computation alone",
    "ddp": "DDP",
    "fp16_hook": "torch's fp16 hook",
    "powersgd_hook": "torch's PowerSGD hook, rank 4",
}


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


def read_csv() -> list[StepTime]:
    """All lines."""
    return records.read(CSV, StepTime)


def record(new: Iterable[StepTime]) -> None:
    """Add lines; one replaces an earlier one of the same link and method."""
    by_method = {(each.rate_mbit, each.method): each for each in [*read_csv(), *new]}
    records.write(CSV, [by_method[key] for key in sorted(by_method)])


def table() -> str:
    """Milliseconds by link and method, the quickest over 1 Gbit/s first."""
    found = {(each.rate_mbit, each.method): each.ms for each in read_csv()}
    rates = sorted({rate for rate, _ in found})
    methods = sorted({method for _, method in found}, key=lambda method: found[1000, method])
    rows = [[title(method), *(f"{found[rate, method]:,.0f}" for rate in rates)] for method in methods]
    return report.table(["method", *map(link, rates)], rows)


def title(method: str) -> str:
    """As in a table: "dgc@all_gather" is `dgc`."""
    return TITLES.get(method, f"`{method.partition('@')[0]}`")


def link(rate_mbit: int) -> str:
    """100 Mbit/s, 1 Gbit/s."""
    return f"{rate_mbit} Mbit/s" if rate_mbit < 1000 else f"{rate_mbit / 1000:g} Gbit/s"
