"""Milliseconds to compress and decompress gradients by size and method, compared with plain passes over the memory.

    python -m benchmarks.encode --elements 1000000,11200000 --threads 1    # about two minutes
    python -m benchmarks.encode --device cuda --layout resnet18,resnet50 --csv encode.csv

A single process receives its own messages, so nothing waits for a link. "compress" is everything before the
exchange: error feedback, selection or quantisation, packing. "decompress" is everything after it, including writing the
gradients back. A GPU is idle when a phase begins, and has finished when it ends; "step" is both phases without these
waits. Gradients are normally distributed, with a different scale for each tensor, and new at every step; methods take
turns. The passes: `copy` reads and writes the gradient once; `momentum` is DGC's arithmetic without selection
(u = m u + g, v = v + u); `topk` is torch.topk on magnitudes, 0.1 %. GB/s count the gradient's bytes once.

With --csv, a method that fails is a line with its error.

Private: `average_compressed` and what it needs, since a `GradientAverager` on one rank compresses nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torchvision
from torch.utils.benchmark import Timer

import lightning_gradcomp as lgc
from benchmarks import methods, report
from lightning_gradcomp.app.plan import EchoRanks
from lightning_gradcomp.averaging.exchange import Flags
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.memory import Memory
from lightning_gradcomp.averaging.step import average_compressed
from lightning_gradcomp.averaging.topology import Topology

TENSORS = 20
PASSES = {"copy": "u.copy_(g)", "momentum": "u.mul_(0.9).add_(g); v.add_(u)", "topk": "g.abs().topk(k, sorted=False)"}
LAYOUTS: dict[str, Callable[[], torch.nn.Module]] = {
    "resnet18": partial(torchvision.models.resnet18, num_classes=10),  # 11.2 million elements
    "resnet50": torchvision.models.resnet50,  # 25.6 million
    "small": methods.small,  # 85,000
}
LOSSY = [entry.name for entry in lgc.entries() if issubclass(entry.cls, lgc.LossyCompressor)]


@dataclass(frozen=True, kw_only=True)
class EncodeTime:
    """A line of the CSV: medians in milliseconds for one method and one layout of the gradients."""

    layout: str
    elements: int
    method: str
    optimizer: str  # "none" for a pass
    compress_ms: float | None = None
    decompress_ms: float | None = None
    step_ms: float | None = None
    gb_per_s: float | None = None  # of compress_ms
    copy_gb_per_s: float | None = None  # of the pass `copy`
    error: str | None = None
    machine: str


class Matrices(torch.nn.Module):
    """TENSORS equal matrices with `elements` in total."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        columns = max(32, round((elements / TENSORS) ** 0.5))
        shape = (elements // TENSORS // columns, columns)
        self.parts = torch.nn.ParameterList(torch.zeros(shape) for _ in range(TENSORS))


class Timed(lgc.Stats):
    """Phases that end when the device is done with them."""

    device = torch.device("cpu")

    def now(self, phase: str | None) -> None:
        methods.wait(self.device)
        super().now(phase)


class Compression:
    """Compressed steps of a rank, after the warm-up.

    Args:
        name: of the method, as in benchmarks/methods.py.
        optimizer: one of methods.OPTIMIZERS.
        model: its gradients are replaced by random ones.
    """

    def __init__(self, name: str, optimizer: str, model: torch.nn.Module) -> None:
        self.model, self.steps = model, 0
        stepped = methods.OPTIMIZERS[optimizer](model)
        how = methods.compressor(name).for_optimizer(stepped)
        assert isinstance(how, lgc.LossyCompressor)
        self.final = how.with_sparsity(how.final_sparsity)
        self.memory = Memory(how, Gradients(model, how), EchoRanks(None), Topology(), stepped)

    def new_gradients(self) -> None:
        for number, parameter in enumerate(self.model.parameters()):
            parameter.grad = torch.randn_like(parameter).mul_(10.0 ** (-number % 4))

    def average(self, stats: lgc.Stats) -> None:
        """Compress the gradients, exchange them and decompress the average."""
        average = average_compressed(self.memory, self.final, "all_gather", self.steps, Flags(), stats)
        stats.now(None)
        self.steps += 1
        assert average.commit is not None
        average.commit(average.names)


def passes(elements: int, device: torch.device, threads: int, repeats: int) -> dict[str, float]:
    """Name -> median milliseconds."""
    g, u, v = (torch.randn(elements, device=device) for _ in range(3))
    known = {"g": g, "u": u, "v": v, "k": max(1, elements // 1000)}
    timers = {name: Timer(code, globals=known, num_threads=threads) for name, code in PASSES.items()}
    calls = 20 if device.type == "cuda" else 1  # a GPU is idle while the host begins
    times = {name: [timer.timeit(calls).median for _ in range(repeats)] for name, timer in timers.items()}
    return {name: 1e3 * median(each) for name, each in times.items()}


@dataclass
class Result:
    """Measurements of one method: milliseconds of compress, decompress and the step, a list for each time."""

    times: list[tuple[float, float, float]]
    error: str | None = None


def compressed(
    layout: Callable[[], torch.nn.Module], cases: Sequence[tuple[str, str]], device: torch.device, steps: int
) -> dict[tuple[str, str], Result]:
    """(method, optimizer) -> what a step takes. A method that raises has an error instead."""
    made: dict[tuple[str, str], Compression] = {}
    found = {case: Result([]) for case in cases}

    def attempt(case: tuple[str, str], call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # the other methods can still be measured
            print(f"{case}: {error!r}", flush=True)
            found[case].error = f"{type(error).__name__}: {error}"
            made.pop(case, None)

    def make(case: tuple[str, str]) -> None:
        made[case] = Compression(*case, layout().to(device))

    for case in cases:
        attempt(case, partial(make, case))
    for step in range(steps + 2):
        for case, compression in list(made.items()):
            into = found[case].times if step > 1 else []  # the first two steps allocate buffers
            attempt(case, partial(_time, compression, device, into))
    return found


def _time(compression: Compression, device: torch.device, into: list[tuple[float, float, float]]) -> None:
    compression.new_gradients()
    stats = Timed()
    stats.device = device
    compression.average(stats)
    compression.new_gradients()
    methods.wait(device)
    begin = time.perf_counter()
    compression.average(lgc.Stats())
    methods.wait(device)
    step = time.perf_counter() - begin
    into.append((1e3 * stats.seconds["compress"], 1e3 * stats.seconds["decompress"], 1e3 * step))


def lines(
    name: str, model: Callable[[], torch.nn.Module], cases: Sequence[tuple[str, str]], arguments: argparse.Namespace
) -> Iterator[EncodeTime]:
    """The lines of one layout: the passes, then the methods."""
    device = torch.device(arguments.device)
    elements = sum(parameter.numel() for parameter in model().parameters())
    common = {"layout": name, "elements": elements, "machine": report.machine()}
    by_pass = passes(elements, device, arguments.threads, arguments.steps)
    common["copy_gb_per_s"] = round(4e-6 * elements / by_pass["copy"], 3)
    for method, ms in by_pass.items():
        yield EncodeTime(
            method=method, optimizer="none", compress_ms=round(ms, 4), gb_per_s=_gb_per_s(elements, ms), **common
        )
    for (method, optimizer), result in compressed(model, cases, device, arguments.steps).items():
        done: dict[str, float] = {}
        if result.times:
            before, after, step = (round(median(each), 4) for each in zip(*result.times, strict=True))
            done |= {"compress_ms": before, "decompress_ms": after, "step_ms": step}
            done["gb_per_s"] = _gb_per_s(elements, before)
        yield EncodeTime(method=method, optimizer=optimizer, error=result.error, **done, **common)


def _gb_per_s(elements: int, ms: float) -> float:
    return round(4e-6 * elements / ms, 3)


def row(each: EncodeTime, momentum: float) -> list[str]:
    """A line, for the screen; `momentum` is what that pass takes."""
    name = each.method if each.optimizer in ("none", "sgd") else f"{each.method}, {each.optimizer}"
    if each.compress_ms is None:
        return [f"{each.elements:,}", name, each.error or "", "", "", ""]
    figures = [f"{each.compress_ms:.1f}", f"{each.gb_per_s:.1f}", f"{each.compress_ms / momentum:.1f}x"]
    return [f"{each.elements:,}", name, *figures, "" if each.step_ms is None else f"{each.decompress_ms:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(LOSSY))
    parser.add_argument("--adamw", default="", help="methods that are measured with AdamW too")
    parser.add_argument("--elements", default="1000000,11200000,45000000", help=f"in {TENSORS} equal matrices")
    parser.add_argument("--layout", default="", help=f"instead: the gradients of {', '.join(LAYOUTS)}")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--csv", type=Path, help="add to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    cases = [(name, "sgd") for name in arguments.methods.split(",")]
    cases += [(name, "adamw") for name in arguments.adamw.split(",") if name]
    layouts = {name: LAYOUTS[name] for name in arguments.layout.split(",") if name}
    if not layouts:
        layouts = {f"matrices {size}": partial(Matrices, int(size)) for size in arguments.elements.split(",")}
    rows = []
    for name, model in layouts.items():
        found = list(lines(name, model, cases, arguments))
        [momentum] = [each.compress_ms for each in found if each.method == "momentum"]
        rows += [row(each, momentum) for each in found]
        if arguments.csv:
            report.record(arguments.csv, found, lambda each: (each.layout, each.optimizer, each.method))
    print(f"{report.machine()}, {arguments.threads} thread")
    head = ["elements", "method", "ms to compress", "GB/s", "to momentum alone", "ms to decompress"]
    print(report.table(head, rows))


if __name__ == "__main__":
    main()
