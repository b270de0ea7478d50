"""Peak memory of a rank, by method, beside that of plain DDP.

    python -m benchmarks.memory --methods ddp,dgc,powersgd --out results

Every method trains in ranks of its own, started with torchrun. What is counted is the highest that a rank had beyond
what it had before the model was made: resident memory on a CPU, allocated memory on a GPU. Warm-ups are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.axes import Axes

from benchmarks import report, started
from benchmarks.methods import OPTIMIZERS, network, stepper

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def train(method: str, arguments: argparse.Namespace) -> float:
    """Bytes that a few steps of `method` needed on this rank at most."""
    device = started.device()
    before = resident()
    torch.manual_seed(0)
    model = network(arguments.model).to(device)
    step = stepper(method, model, OPTIMIZERS[arguments.optimizer](model))
    images = torch.randn(arguments.batch, 3, arguments.size, arguments.size, device=device)
    labels = torch.randint(0, 10, (arguments.batch,), device=device)
    for _ in range(arguments.steps):
        step(images, labels)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def run(method: str, arguments: argparse.Namespace) -> float:
    """The highest of all ranks, in MB, of ranks that are started for it."""
    same = [f"--{name}={getattr(arguments, name)}" for name in ("model", "optimizer", "batch", "size", "steps")]
    return started.result(__spec__.name, arguments.ranks, [*same, "--method", method]) / 1e6


def draw(results: dict[str, float]) -> Callable[[Axes], None]:
    """Bars."""

    def on(axes: Axes) -> None:
        axes.barh(list(results), list(results.values()), color="tab:blue")
        axes.invert_yaxis()
        axes.set(xlabel="MB a rank, at most")

    return on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    methods = "compute,ddp,fp16_hook,powersgd_hook,dgc,gradient_dropping,powersgd,onebit,twobit,terngrad"
    parser.add_argument("--methods", default=methods, help="as in benchmarks.step_time")
    parser.add_argument("--model", default="torchvision.resnet18")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--size", type=int, default=32, help="pixels of an image's side")
    parser.add_argument("--batch", type=int, default=32, help="images a rank and step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a folder for memory.json and memory.png")
    parser.add_argument("--method", help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.method:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        most = torch.tensor(float(train(arguments.method, arguments)))
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            arguments.place.write_text(json.dumps(most.item()))
        dist.destroy_process_group()
        return
    results = {method: run(method, arguments) for method in arguments.methods.split(",")}
    print(f"{arguments.model}, batch {arguments.batch}, N={arguments.ranks}, {report.machine()}")
    ratio = {method: f"{mb / results['ddp']:.2f}x" if "ddp" in results else "" for method, mb in results.items()}
    rows = [[method, f"{mb:.0f}", ratio[method]] for method, mb in results.items()]
    print(report.table(["method", "MB at most", "to DDP"], rows))
    report.write(arguments.out, "memory", results, vars(arguments), draw(results))


if __name__ == "__main__":
    main()
