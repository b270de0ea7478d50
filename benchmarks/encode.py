"""Milliseconds to compress and decompress gradients by size and method, compared with plain passes over the memory.

    python -m benchmarks.encode --elements 1000000,11200000 --threads 1    # about two minutes

A single process exchanges messages with itself, so nothing waits for a link. "compress" is everything before the
exchange: error feedback, selection or quantisation, packing. "decompress" is everything after it, including writing the
gradients back. Gradients are normally distributed, with a different scale for each of 20 tensors, and new at every
step; methods take turns. The passes: `copy` reads and writes the gradient once; `momentum` is DGC's arithmetic without
selection (u = m u + g, v = v + u); `topk` is torch.topk on magnitudes, 0.1 %.

Private: `average_compressed` and what it needs, since a `GradientAverager` on one rank compresses nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

import lightning_gradcomp as lgc
from benchmarks import methods, report
from lightning_gradcomp.averaging.exchange import Flags
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.memory import Memory
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.step import average_compressed
from lightning_gradcomp.averaging.topology import Topology

TENSORS = 20
PASSES = {"copy": "u.copy_(g)", "momentum": "u.mul_(0.9).add_(g); v.add_(u)", "topk": "g.abs().topk(k, sorted=False)"}


class Matrices(torch.nn.Module):
    """TENSORS equal matrices with `elements` in total, and room for gradients."""

    def __init__(self, elements: int, device: torch.device) -> None:
        super().__init__()
        columns = max(32, round((elements / TENSORS) ** 0.5))
        shape = (elements // TENSORS // columns, columns)
        self.parts = torch.nn.ParameterList(torch.zeros(shape, device=device) for _ in range(TENSORS))

    def new_gradients(self) -> None:
        for number, part in enumerate(self.parts):
            part.grad = torch.randn_like(part).mul_(10.0 ** (-number % 4))


class Timed(lgc.Stats):
    """Phases that end when the device is done with them."""

    device = torch.device("cpu")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        methods.wait(self.device)
        with super().phase(name):
            yield
            methods.wait(self.device)


def passes(elements: int, device: torch.device, threads: int) -> dict[str, tuple[float, float]]:
    """Name -> (median milliseconds, 0 to decompress)."""
    g, u, v = (torch.randn(elements, device=device) for _ in range(3))
    known = {"g": g, "u": u, "v": v, "k": max(1, elements // 1000)}
    timers = {name: Timer(code, globals=known, num_threads=threads) for name, code in PASSES.items()}
    return {name: (1e3 * timer.blocked_autorange(min_run_time=1).median, 0.0) for name, timer in timers.items()}


def compressed(elements: int, names: list[str], device: torch.device, steps: int) -> dict[str, tuple[float, float]]:
    """Method -> median milliseconds to compress and to decompress."""
    made: dict[str, tuple[Matrices, lgc.LossyCompressor, Memory]] = {}
    for name in names:
        model, how = Matrices(elements, device), methods.compressor(name)
        assert isinstance(how, lgc.LossyCompressor)
        optimizer, ranks = methods.sgd(model), Ranks(dist.group.WORLD)
        memory = Memory(how, Gradients(model, how), ranks, Topology(), optimizer)
        made[name] = model, how.with_sparsity(how.final_sparsity), memory
    found: dict[str, list[Timed]] = {name: [] for name in names}
    for step in range(steps + 2):
        for name, (model, final, memory) in made.items():
            model.new_gradients()
            found[name].append(stats := Timed())
            stats.device = device
            average = average_compressed(memory, final, "all_gather", step, Flags(), stats)
            assert average.commit is not None
            average.commit(average.names)
    return {  # the first two steps allocate buffers
        name: tuple(1e3 * median(each.seconds[phase] for each in stats[2:]) for phase in ("compress", "decompress"))
        for name, stats in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lossy = [entry.name for entry in lgc.entries() if issubclass(entry.cls, lgc.LossyCompressor)]
    parser.add_argument("--methods", default=",".join(lossy))
    parser.add_argument("--elements", default="1000000,11200000,45000000")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    device, names = torch.device(arguments.device), arguments.methods.split(",")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    for size in map(int, arguments.elements.split(",")):
        found = passes(size, device, arguments.threads)
        momentum, _ = found["momentum"]
        found |= compressed(size, names, device, arguments.steps)
        for name, (before, after) in found.items():
            figures = [f"{before:.1f}", f"{4e-6 * size / before:.1f}", f"{before / momentum:.1f}x", f"{after:.1f}"]
            rows.append([f"{size:,}", name, *figures])
    print(f"{report.machine()}, {arguments.threads} thread")
    head = ["elements", "method", "ms to compress", "GB/s", "to momentum alone", "ms to decompress"]
    print(report.table(head, rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
