"""Milliseconds to compress and decompress gradients by size and method, beside plain passes over the same memory.

    python -m benchmarks.encode --elements 1000000,11200000 --threads 1 --out results

One process, whose message comes back to itself, so that nothing waits for a link. "compress" is everything before the
exchange: error feedback, selection or quantisation, packing; "decompress" everything after it, the gradients' places
included. Gradients are normal with a scale of its own for each tensor, new at every step. The passes: `copy` reads and
writes the gradient once; `momentum` is DGC's arithmetic without any selection (u = m u + g, v = v + u); `topk` is
torch.topk on magnitudes, 0.1 %.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from matplotlib.axes import Axes

import lightning_gradcomp as lgc
from benchmarks import report, started
from benchmarks.methods import compressor
from lightning_gradcomp.averaging.exchange import Flags
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.memory import Memory
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.stats import Stats
from lightning_gradcomp.averaging.step import average_compressed
from lightning_gradcomp.averaging.topology import Topology

TENSORS = 20


class Matrices(torch.nn.Module):
    """TENSORS equal matrices with `elements` in all, and room for gradients."""

    def __init__(self, elements: int, device: torch.device) -> None:
        super().__init__()
        columns = max(32, round((elements / TENSORS) ** 0.5))
        shape = (elements // TENSORS // columns, columns)
        self.parts = torch.nn.ParameterList(torch.zeros(shape, device=device) for _ in range(TENSORS))
        self.scales = [10.0 ** (-part % 4) for part in range(TENSORS)]

    def new_gradients(self) -> None:
        for part, scale in zip(self.parts, self.scales, strict=True):
            part.grad = torch.randn_like(part).mul_(scale)


def passes(flat: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What any compressor's time is to be seen beside."""
    gradient, u, v = flat, torch.zeros_like(flat), torch.zeros_like(flat)

    def momentum() -> None:
        u.mul_(0.9).add_(gradient)
        v.add_(u)

    few = max(1, flat.numel() // 1000)
    return {"copy": lambda: u.copy_(flat), "momentum": momentum, "topk": lambda: flat.abs().topk(few, sorted=False)}


class Timed(Stats):
    """Phases that end when `device` is done with them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started.wait(self._device)
        with super().phase(name):
            yield
            started.wait(self._device)


def timed(action: Callable[[], object], device: torch.device) -> float:
    """Milliseconds."""
    started.wait(device)
    begin = time.perf_counter()
    action()
    started.wait(device)
    return 1e3 * (time.perf_counter() - begin)


def measure(elements: int, methods: list[str], device: torch.device, steps: int) -> dict[str, dict[str, float]]:
    """Method -> median milliseconds and GB/s of fp32 gradient; methods take turns at every step."""
    models, memories = {}, {}
    for method in methods:
        model = Matrices(elements, device)
        how = compressor(method)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        ranks = Ranks(dist.group.WORLD)
        models[method] = model
        memory = Memory(how, Gradients(model, how), ranks, Topology(), optimizer)
        memories[method] = how.with_sparsity(how.final_sparsity), memory
    plain = passes(torch.randn(elements, device=device))
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in [*plain, *methods]}
    for step in range(steps + 2):
        figures = {name: (timed(action, device), 0.0) for name, action in plain.items()}
        for method, (final, memory) in memories.items():
            models[method].new_gradients()
            stats = Timed(device)
            average = average_compressed(memory, final, "all_gather", step, Flags(), stats)
            average.commit(average.names)
            figures[method] = (1e3 * stats.seconds["compress"], 1e3 * stats.seconds["decompress"])
        if step >= 2:  # the first find their buffers
            for name, pair in figures.items():
                seconds[name].append(pair)
    results = {}
    for name, pairs in seconds.items():
        before, after = (median(pair[side] for pair in pairs) for side in (0, 1))
        results[name] = {"compress_ms": before, "decompress_ms": after, "compress_GB_per_s": 4e-6 * elements / before}
    return results


def draw(results: dict[str, dict[str, dict[str, float]]]) -> Callable[[Axes], None]:
    """Milliseconds to compress over elements, a line a method."""

    def on(axes: Axes) -> None:
        sizes = [int(size) for size in results]
        for name in next(iter(results.values())):
            style = "--" if name in ("copy", "momentum", "topk") else "-"
            heights = [of_size[name]["compress_ms"] for of_size in results.values()]
            axes.plot(sizes, heights, style, marker=".", label=name)
        axes.set(xscale="log", yscale="log", xlabel="elements", ylabel="ms to compress")
        axes.legend(fontsize="small")

    return on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lossy = [entry.name for entry in lgc.entries() if issubclass(entry.cls, lgc.LossyCompressor)]
    parser.add_argument("--methods", default=",".join(lossy))
    parser.add_argument("--elements", default="1000000,11200000,45000000")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="a folder for encode.json and encode.png")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    store = dist.HashStore()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
    results = {}
    for size in arguments.elements.split(","):
        results[size] = measure(int(size), arguments.methods.split(","), device, arguments.steps)
    print(f"{report.machine()}, {arguments.threads} thread")
    rows = []
    for size, methods in results.items():
        for name, r in methods.items():
            to_momentum = r["compress_ms"] / methods["momentum"]["compress_ms"]
            figures = [f"{r['compress_ms']:.1f}", f"{r['compress_GB_per_s']:.1f}", f"{to_momentum:.1f}x"]
            rows.append([f"{int(size):,}", name, *figures, f"{r['decompress_ms']:.1f}"])
    head = ["elements", "method", "ms to compress", "GB/s", "to momentum alone", "ms to decompress"]
    print(report.table(head, rows))
    report.write(arguments.out, "encode", results, vars(arguments), draw(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
