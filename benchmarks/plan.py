"""How true `gradcomp plan` is: steps as it models them from what it measures, and as they are, in one run.

    python -m benchmarks.link --nodes 2 --rate-mbit 1000 -- python -m benchmarks.plan --methods dgc,onebit,powersgd

The link, the computation and each method's work are measured by the planner's own functions, on all ranks at once; the
steps as in `benchmarks.step_time`, taking turns. DDP is the dense one. One thread a process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.axes import Axes

from benchmarks import methods as named
from benchmarks import report, step_time
from lightning_gradcomp.app.plan.forecast import Forecast, topologies
from lightning_gradcomp.app.plan.link import measure_link, measure_work
from lightning_gradcomp.app.plan.measure import measure_computation
from lightning_gradcomp.app.plan.workload import classifier
from lightning_gradcomp.averaging.gradients import Gradients

CPU = torch.device("cpu")


def modelled(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the planner measures, and "method@topology" -> the seconds it gives a step; "ddp" is the dense one."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    model = named.network(arguments.model)
    workload = classifier(arguments.model, model, CPU, batch=arguments.batch, size=arguments.size, classes=10)
    computation = measure_computation(workload, group, CPU)
    methods = {}
    for method in arguments.methods.split(","):
        compressor = named.compressor(method)
        methods[method] = compressor, measure_work(compressor, Gradients(model, compressor), group)
    link = measure_link(group, CPU)
    forecast = Forecast(model, computation, methods)
    seconds = {"ddp": forecast.dense(group.size(), link)}
    for method, (compressor, _) in methods.items():
        for topology in arguments.topologies.split(","):
            if topology in topologies(compressor):
                seconds[f"{method}@{topology}"] = forecast.step(method, topology, group.size(), link).seconds
    work = {method: asdict(work) for method, (_, work) in methods.items()}
    return {"link": asdict(link), "computation": asdict(computation), "work": work, "seconds": seconds}


def compared(arguments: argparse.Namespace) -> dict[str, Any]:
    """`modelled`, and the steps' medians: "measured", in seconds, with those of computation alone; and the errors."""
    results = modelled(arguments)
    arguments.methods = ",".join(["compute", *results["seconds"]])
    steps = {method: result["ms"] / 1e3 for method, result in step_time.measure(arguments).items()}
    errors = {method: seconds / steps[method] - 1 for method, seconds in results["seconds"].items()}
    return {**results, "measured": steps, "errors": errors, "median_error": median(map(abs, errors.values()))}


def rows(results: dict[str, Any]) -> list[list[str]]:
    """For the table."""
    given = {"compute": results["computation"]["seconds"], **results["seconds"]}
    measured = results["measured"]
    return [
        [
            method,
            f"{1e3 * seconds:.1f}",
            f"{1e3 * measured[method]:.1f}",
            f"{100 * (seconds / measured[method] - 1):+.1f} %",
        ]
        for method, seconds in given.items()
    ]


def draw(results: dict[str, Any]) -> Callable[[Axes], None]:
    """Points, on a diagonal where the model is right."""

    def on(axes: Axes) -> None:
        for method, seconds in results["seconds"].items():
            axes.plot([1e3 * results["measured"][method]], [1e3 * seconds], "o", label=method)
        ends = [1e3 * bound(results["measured"].values()) for bound in (min, max)]
        axes.plot(ends, ends, color="grey", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel="measured ms a step", ylabel="modelled ms a step")
        axes.legend(fontsize="small")

    return on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="dgc,onebit,powersgd", help="as in benchmarks.step_time")
    parser.add_argument("--topologies", default="all_gather,two_phase,server")
    parser.add_argument("--model", default="torchvision.resnet18", help="or a name of the recipes', as resnet18")
    parser.add_argument("--size", type=int, default=32, help="pixels of an image's side")
    parser.add_argument("--batch", type=int, default=32, help="images a rank and step")
    parser.add_argument("--steps", type=int, default=3, help="steps a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a folder for plan.json and plan.png")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = compared(arguments)
    if dist.get_rank() == 0:
        conditions = {**vars(arguments), "N": dist.get_world_size()}
        link = results["link"]
        print(f"\n{arguments.model} at {arguments.size}x{arguments.size}, batch {arguments.batch}, ", end="")
        print(f"N={conditions['N']}, {report.machine()}")
        print(f"link: {link['bandwidth'] * 8e-6:.0f} Mbit/s, {1e3 * link['latency']:.2f} ms a hop, ", end="")
        print(f"busy {link['busy']:.2f}")
        print(report.table(["step", "modelled ms", "measured ms", "error"], rows(results)))
        print(f"median absolute error, without computation alone: {100 * results['median_error']:.1f} %")
        report.write(arguments.out, "plan", results, conditions, draw(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
