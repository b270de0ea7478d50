"""Bytes that a rank sends in a step as ranks are added, by topology: by the formula, and measured for a few ranks.

    python -m benchmarks.growth --methods dgc,dgc:sparsity=0.99 --measured 2,4,8 --out results

Measured: as many processes on this machine, random gradients, one compressed step; the rank that sent the most.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.axes import Axes

import lightning_gradcomp as lgc
from benchmarks import report, started
from benchmarks.methods import compressor, network
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.ranks import Ranks, dense_traffic
from lightning_gradcomp.averaging.traffic import traffic

CHOICES = ("all_gather", "two_phase", "server")


def formula(model: torch.nn.Module, method: str, topology: str, world: int) -> int:
    """Bytes that the rank which sends the most would send."""
    how = compressor(method)
    assert isinstance(how, lgc.LossyCompressor)
    return traffic(how.with_sparsity(how.final_sparsity), Gradients(model, how), Ranks(None, world), topology)


def measured(arguments: argparse.Namespace, world: int) -> dict[str, int]:
    """Method and topology -> bytes, of `world` ranks that are started for it."""
    return started.result(__spec__.name, world, ["--model", arguments.model, "--methods", arguments.methods])


def step(arguments: argparse.Namespace) -> None:
    """One rank of `measured`."""
    dist.init_process_group("gloo")
    sent: dict[str, int] = {}
    generator = torch.Generator().manual_seed(dist.get_rank())
    for method in arguments.methods.split(","):
        for topology in CHOICES:
            torch.manual_seed(0)
            model = network(arguments.model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            averager = lgc.GradientAverager(model, compressor(method), optimizer=optimizer, topology=topology)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            averager.average()
            most = torch.tensor(averager.stats.bytes_sent)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            sent[f"{method}, {topology}"] = int(most)
    if dist.get_rank() == 0:
        arguments.place.write_text(json.dumps(sent))
    dist.barrier()
    dist.destroy_process_group()


def draw(results: dict[str, dict[int, int]]) -> Callable[[Axes], None]:
    """A line a method and topology."""

    def on(axes: Axes) -> None:
        for (name, by_world), style in zip(results.items(), ["-", "--", "-.", ":"] * len(results), strict=False):
            axes.plot(list(by_world), [size / 1e6 for size in by_world.values()], style, marker=".", label=name)
        axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="MB that a rank sends in a step")
        axes.legend(fontsize="small")

    return on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="dgc,dgc:sparsity=0.99,onebit,terngrad", help="as in benchmarks.step_time")
    parser.add_argument("--model", default="torchvision.resnet18")
    parser.add_argument("--measured", default="2,4,8", help="numbers of ranks to start")
    parser.add_argument("--ranks", default="2,4,8,16,32,64,128,256,512,1024", help="numbers of ranks for the formula")
    parser.add_argument("--out", type=Path, help="a folder for growth.json and growth.png")
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.place:
        step(arguments)
        return
    model, worlds = network(arguments.model), [int(world) for world in arguments.ranks.split(",")]
    every = 4 * sum(parameter.numel() for parameter in model.parameters())
    results = {"dense ring": {world: dense_traffic(every, world) for world in worlds}}
    for method in arguments.methods.split(","):
        for topology in CHOICES:
            by_world = {world: formula(model, method, topology, world) for world in worlds}
            results[f"{method}, {topology}"] = by_world
    for world in map(int, filter(None, arguments.measured.split(","))):
        for name, size in measured(arguments, world).items():
            print(f"{name}, N={world}: measured {size:,}, formula {results[name][world]:,}")
    rows = [[name, *(f"{size:,}" for size in by_world.values())] for name, by_world in results.items()]
    print(report.table(["bytes a rank sends", *(f"N={world}" for world in worlds)], rows))
    report.write(arguments.out, "growth", results, vars(arguments), draw(results))


if __name__ == "__main__":
    main()
