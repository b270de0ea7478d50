"""Cost of a training step by method, in milliseconds and relative to computation alone, on any device and link.

    torchrun --nproc-per-node=2 -m benchmarks.step_time --methods compute,ddp,dgc,powersgd
    python -m benchmarks.link --rate-mbit 1000 -- python -m benchmarks.step_time --record 1000  # step_times.csv
    python -m benchmarks.link --rate-mbit 1000 -- python -m benchmarks.step_time --record 1000 \
--model torchvision.swin_t --optimizer adamw --size 64 --batch 4 --methods compute,ddp,fp16_hook,int8,eden,eden:bits=2
    python -m benchmarks.link --rate-mbit 1000 -- python -m benchmarks.step_time --record 1000 \
--model gpt_small --optimizer adamw --size 128 --batch 1 --steps 1 --turns 2 --methods compute,eden  # one at a time
    python -m benchmarks.link --rate-mbit 1000 --delay-ms 25 -- python -m benchmarks.step_time --record 1000 \
--delay-ms 25 --methods compute,ddp,local,dga,auto --model small --span 24 --steps 1  # also 0, 10, 50, 100
    python -m benchmarks.link --ranks-per-node 2 --rate-mbit 1000 -- python -m benchmarks.step_time --record 1000 \
--methods compute,hsdp,hsdp+dgc,hsdp+powersgd,ddp --model torchvision.swin_t --optimizer adamw --size 64 --batch 4

Each takes one to five minutes, longer over slow links. Each method (benchmarks/methods.py) trains its own copy of the
model. Methods take turns of a few steps, so that the machine's noise affects all of them alike. Results are medians
over all turns, for the slower rank. Images are random, weights are trained, and warm-ups are skipped. With rounds of K
steps only one step in many waits, so whole rounds are timed, after one to warm up; `--span` times that many steps of
the other methods together. A node's bytes are those that the kernel counts on its interface. Each process has one
thread. Ranks use a GPU if there is one, but exchange over gloo, since NCCL refuses two ranks on one GPU.

Private: `Autotune.outcome` and `RoundSchedule.measuring`, to wait for the end of a trial.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

import lightning_gradcomp as lgc
from benchmarks import memory, methods, report

METHODS = "compute,ddp,fp16_hook,int8,powersgd_hook," + ",".join(
    f"{method}@all_gather" for method in ("dgc", "gradient_dropping", "powersgd", "onebit", "twobit", "terngrad")
)
PHASES = ("compress", "exchange", "decompress")
COLUMNS = ("method", "ms a step (lowest to highest turn)", "to computation", "of it " + ", ".join(PHASES), "K, D")
COLUMNS += ("bytes sent a step", "bytes a node sends a step")
"""For the screen. Columns without entries are left out."""
COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")

CSV = report.DATA / "step_times.csv"
COMPUTATION = "compute"


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A line of the CSV: medians of a method over one link, for the slower rank, in milliseconds."""

    network: str  # --model
    ranks: int
    rate_mbit: int  # 0: loopback
    delay_ms: int  # one way
    method: str
    ms: float
    compute_ms: float  # of computation alone, in the same run
    bytes_sent: int | None  # None if not counted: computation, DDP, torch's hooks
    node_bytes: int | None  # with headers, as the kernel counts; None if no node is emulated
    compress_ms: float | None
    exchange_ms: float | None
    decompress_ms: float | None
    machine: str

    @property
    def identity(self) -> tuple[str, int, int, int, str]:
        """A line replaces an earlier one with the same."""
        return self.network, self.ranks, self.rate_mbit, self.delay_ms, self.method


def read_csv(network: str, ranks: int = 2) -> list[StepTime]:
    """The lines of a network, by rate, delay and method."""
    return [each for each in report.read(CSV, StepTime) if (each.network, each.ranks) == (network, ranks)]


def of_network(network: str, ranks: int = 2) -> dict[tuple[int, str], StepTime]:
    """(Mbit/s, method) -> the line without delay."""
    return {(each.rate_mbit, each.method): each for each in read_csv(network, ranks) if not each.delay_ms}


def table(network: str) -> str:
    """A table of the page: milliseconds by link and method, fastest over 1 Gbit/s first, and what a node sends."""
    found = of_network(network)
    rates = sorted({rate for rate, _ in found})
    rows = []
    for name in sorted({method for _, method in found}, key=lambda method: found[1000, method].ms):
        row = [methods.title(name), *(f"{found[rate, name].ms:,.0f}" for rate in rates)]
        rows.append([*row, f"{(found[1000, name].node_bytes or 0) / 1e6:.1f}"])
    return report.table(["method", *map(link, rates), "MB a node sends"], rows)


def hsdp() -> str:
    """A table of the page: swin_t on two nodes of two ranks, over 1 Gbit/s, fastest first."""
    found, rows = of_network("torchvision.swin_t", ranks=4), []
    peaks = {each.method: each.mb for each in report.read(memory.CSV, memory.Memory) if each.ranks == 4}
    for name in sorted(peaks, key=lambda method: found[1000, method].ms):
        each = found[1000, name]
        numbers = f"{each.ms:,.0f}", f"{(each.node_bytes or 0) / 1e6:.1f}", f"{peaks[name]:,.0f}"
        rows.append([methods.title(name), *numbers])
    return report.table(["method", "step, ms", "a node sends, MB", "memory of a rank, MB"], rows)


def link(rate_mbit: int) -> str:
    """Format a rate: 100 Mbit/s, 1 Gbit/s."""
    return f"{rate_mbit} Mbit/s" if rate_mbit < 1000 else f"{rate_mbit / 1000:g} Gbit/s"


class Span(NamedTuple):
    """Steps timed together: a step's mean milliseconds on the slower rank, and its costs on this rank.

    Args:
        sent: bytes of gradients, if they are counted.
        crossed: bytes that this node sent, including headers; None if it is not emulated.
        phases: milliseconds of PHASES, for methods that average at each step.
        pace: K and D, for rounds.
    """

    ms: float
    sent: int | None
    crossed: int | None
    phases: list[float] | None = None
    pace: tuple[int, int] | None = None


Turns = dict[str, list[list[Span]]]
"""Method -> the spans of each turn."""


def measure(arguments: argparse.Namespace) -> Iterator[Turns]:
    """The turns so far, after each turn."""
    rank, device = dist.get_rank(), methods.device()
    made = methods.batch(arguments.model, arguments.batch, arguments.size, seed=rank)
    images, labels = made[0].to(device), made[1].to(device)
    trained: dict[str, methods.Method] = {}
    for name in arguments.methods.split(","):
        torch.manual_seed(0)  # the same weights on every rank
        model = methods.network(arguments.model).to(device)
        trained[name] = methods.method(name, arguments.optimizer, model, arguments.period)
        while on_trial(trained[name]):
            trained[name].step(images, labels)
        if rank == 0 and (averager := trained[name].averager):
            print(f"{name}: {averager.describe()}", flush=True)
    found: Turns = {name: [] for name in trained}
    for turn in range(arguments.turns + 1):
        for name, method in trained.items():
            length, rounds = method.period * math.ceil(arguments.span / method.period), method.period > 1
            for _ in range(method.period if rounds else 0):
                method.step(images, labels)
            spans = [span(method, length, images, labels) for _ in range(1 if rounds else arguments.steps)]
            if turn:  # the first is for buffers, buckets and caches
                found[name].append(spans)
        if rank == 0:
            print(f"turn {turn} of {arguments.turns}", flush=True)
        if turn:
            yield found


def on_trial(method: methods.Method) -> bool:
    """True while the method is still measuring, to choose how to average."""
    averager = method.averager
    if isinstance(averager, lgc.DelayedAverager):
        return averager.round_schedule.measuring
    return averager is not None and averager.autotune is not None and not averager.autotune.outcome


def span(method: methods.Method, length: int, images: torch.Tensor, labels: torch.Tensor) -> Span:
    """Time `length` steps."""
    averager = method.averager
    late = isinstance(averager, lgc.DelayedAverager)
    dist.barrier()
    counted, before = node_sent(), averager.spent.bytes_sent if late else 0
    begin = time.perf_counter()
    for _ in range(length):
        method.step(images, labels)
    methods.wait(images.device)
    slower = torch.tensor(time.perf_counter() - begin)
    crossed = None if counted is None else ((node_sent() or 0) - counted) // length
    dist.all_reduce(slower, op=dist.ReduceOp.MAX)
    ms = 1e3 * slower.item() / length
    if averager is None:
        return Span(ms, None, crossed)
    if late:
        sent = (averager.spent.bytes_sent - before) // length
        return Span(ms, sent, crossed, pace=(averager.period, averager.delay))
    return Span(ms, averager.stats.bytes_sent, crossed, [1e3 * averager.stats.seconds[phase] for phase in PHASES])


def node_sent() -> int | None:
    """Bytes that this node has sent so far; None if it has no such interface."""
    return int(COUNTER.read_text()) if COUNTER.exists() else None


def step_times(found: Turns, network: str, rate_mbit: int, delay_ms: int) -> list[StepTime]:
    """Medians over the spans of all turns. `compute_ms` is NaN if computation alone was not measured."""
    all_spans = {method: [span for turn in turns for span in turn] for method, turns in found.items()}
    compute = median(span.ms for span in all_spans[COMPUTATION]) if COMPUTATION in found else math.nan
    lines = []
    for method, spans in all_spans.items():
        phases = [span.phases for span in spans if span.phases]
        middle = [round(median(each), 1) for each in zip(*phases, strict=True)] or [None] * len(PHASES)
        lines.append(
            StepTime(
                network=network,
                ranks=dist.get_world_size(),
                rate_mbit=rate_mbit,
                delay_ms=delay_ms,
                method=method,
                ms=round(median(span.ms for span in spans), 1),
                compute_ms=round(compute, 1),
                bytes_sent=None if spans[-1].sent is None else round(median(span.sent or 0 for span in spans)),
                node_bytes=None if spans[-1].crossed is None else round(median(span.crossed or 0 for span in spans)),
                **{f"{phase}_ms": each for phase, each in zip(PHASES, middle, strict=True)},
                machine=report.machine(),
            )
        )
    return lines


def row(each: StepTime, turns: list[list[Span]]) -> dict[str, str]:
    """A method's row, for the screen: one of COLUMNS -> text."""
    medians = [median(span.ms for span in turn) for turn in turns]
    phases, sent, pace = each.compress_ms is not None, each.bytes_sent, turns[-1][-1].pace
    words = [
        each.method,
        f"{each.ms:.1f} ({min(medians):.1f} to {max(medians):.1f})",
        "" if math.isnan(each.compute_ms) else f"{each.ms / each.compute_ms:.2f}x",
        f"{each.compress_ms:.0f}, {each.exchange_ms:.0f}, {each.decompress_ms:.0f}" if phases else "",
        f"{pace[0]}, {pace[1]}" if pace else "",
        f"{sent:,}" if sent is not None else "",
        f"{each.node_bytes:,}" if each.node_bytes else "",
    ]
    return dict(zip(COLUMNS, words, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=METHODS, help="as in benchmarks/methods.py")
    parser.add_argument("--model", default="torchvision.resnet18", help="small, gpt_small, or one of the recipes")
    parser.add_argument("--optimizer", choices=methods.OPTIMIZERS, default="sgd")
    parser.add_argument("--size", type=int, default=32, help="pixels per side of an image; tokens of a window")
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--steps", type=int, default=5, help="spans per turn; with rounds, one")
    parser.add_argument("--span", type=int, default=1, help="steps timed together; with rounds, whole rounds")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--period", type=int, default=8, help="K for rounds; for auto, the smallest K")
    parser.add_argument("--record", type=int, help="add to the CSV, for a link of this many Mbit/s; 0: loopback")
    parser.add_argument("--delay-ms", type=int, default=0, help="of the link, to record it")
    parser.add_argument("--csv", type=Path, default=CSV)
    arguments = parser.parse_args()
    if arguments.record is not None and COMPUTATION not in arguments.methods.split(","):
        parser.error("--record needs compute among the --methods, for the ratio to it")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: Turns = {}
    for found in measure(arguments):
        if dist.get_rank() == 0 and arguments.record is not None:
            lines = step_times(found, arguments.model, arguments.record, arguments.delay_ms)
            report.record(arguments.csv, lines, lambda each: each.identity)
    if dist.get_rank() == 0:
        lines = step_times(found, arguments.model, arguments.record or 0, arguments.delay_ms)
        rows = [row(each, found[each.method]) for each in lines]
        head = [column for column in COLUMNS if any(each[column] for each in rows)]
        print(f"\n{arguments.model} at {arguments.size}x{arguments.size}, batch {arguments.batch}, ", end="")
        print(f"{arguments.optimizer}, N={dist.get_world_size()}, {report.machine()}; ", end="")
        print(f"peak memory of a rank {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")
        print(report.table(head, [[each[column] for column in head] for each in rows]))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # late rounds may still be exchanging for minutes


if __name__ == "__main__":
    main()
