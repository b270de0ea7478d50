"""Peak memory of a rank by method, compared with plain DDP.

    python -m benchmarks.memory --methods ddp,dgc,powersgd
    python -m benchmarks.memory --nodes 2 --ranks 4 --model torchvision.swin_t --optimizer adamw --size 64 --batch 4 \
--methods hsdp,hsdp+dgc,hsdp+powersgd,ddp

Each method trains in its own ranks for about 20 seconds. The figure is the peak over ranks of memory used beyond what
a rank had before the model was built: resident memory on a CPU, allocated memory on a GPU. Warm-ups are skipped. With
several nodes, the nodes are emulated (`benchmarks.link`). Ranks exchange over gloo, also if they share a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import methods, report
from benchmarks.link import emulated, local, result

PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """A line of the CSV: the peak of one method."""

    model: str
    optimizer: str
    method: str
    ranks: int
    mb: float
    machine: str


def resident() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def peak(arguments: argparse.Namespace) -> float:
    """Peak memory of a few steps on this rank, in bytes."""
    device, before = methods.device(), resident()
    torch.manual_seed(0)
    model = methods.network(arguments.model).to(device)
    method = methods.method(arguments.methods, arguments.optimizer, model)
    images = torch.randn(arguments.batch, 3, arguments.size, arguments.size, device=device)
    labels = torch.randint(0, 10, (arguments.batch,), device=device)
    for _ in range(arguments.steps):
        method.step(images, labels)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def rank(arguments: argparse.Namespace) -> None:
    """One rank of one method."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    most = torch.tensor(float(peak(arguments)))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        arguments.place.write_text(json.dumps(most.item()))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = "compute,ddp,fp16_hook,powersgd_hook,dgc,gradient_dropping,powersgd,onebit,twobit,terngrad"
    parser.add_argument("--methods", default=names, help="as in benchmarks/methods.py")
    parser.add_argument("--model", default="torchvision.resnet18")
    parser.add_argument("--optimizer", choices=methods.OPTIMIZERS, default="sgd")
    parser.add_argument("--size", type=int, default=32, help="pixels per side of an image")
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--csv", type=Path, help="add to this file")
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.place:
        rank(arguments)
        return
    launcher = local(arguments.ranks)
    if arguments.nodes > 1:
        launcher = emulated(arguments.ranks, arguments.ranks // arguments.nodes)
    same = [f"--{name}={getattr(arguments, name)}" for name in ("model", "optimizer", "size", "batch", "steps")]
    found: dict[str, float] = {}
    for method in arguments.methods.split(","):
        found[method] = result(launcher, "benchmarks.memory", *same, f"--methods={method}")[0] / 1e6
        if arguments.csv:
            line = Memory(
                model=arguments.model,
                optimizer=arguments.optimizer,
                method=method,
                ranks=arguments.ranks,
                mb=round(found[method], 2),
                machine=report.machine(),
            )
            report.record(arguments.csv, [line], lambda each: (each.model, each.optimizer, each.method, each.ranks))
    print(f"{arguments.model}, batch {arguments.batch}, N={arguments.ranks}, {report.machine()}")
    ratio = {method: f"{mb / found['ddp']:.2f}x" if "ddp" in found else "" for method, mb in found.items()}
    rows = [[method, f"{mb:.0f}", ratio[method]] for method, mb in found.items()]
    print(report.table(["method", "MB at most", "to DDP"], rows))


if __name__ == "__main__":
    main()
