"""Peak memory of a rank by method, compared with plain DDP.

    python -m benchmarks.memory --csv docs/data/memory.csv
    python -m benchmarks.memory --csv docs/data/memory.csv --model gpt_small --optimizer adamw --size 128 --batch 1 \
--methods compute,ddp,fp16_hook,int8,eden,eden:bits=2,dgc:dense_values=int8
    python -m benchmarks.memory --csv docs/data/memory.csv --nodes 2 --ranks 4 --model torchvision.swin_t \
--optimizer adamw --size 64 --batch 4 --methods hsdp,hsdp+dgc,hsdp+powersgd,ddp

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

CSV = report.DATA / "memory.csv"
MODELS = {"torchvision.resnet18": "ResNet-18, SGD", "gpt_small": "GPT-2 small, AdamW"}
"""Column of the page's table -> its head."""
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


def table() -> str:
    """The page's table: megabytes by method and network, and compared with DDP."""
    found = {(each.model, each.method): each.mb for each in report.read(CSV, Memory) if each.model in MODELS}
    names = dict.fromkeys(method for _, method in sorted(found, key=lambda place: found[place]))
    rows = [[methods.title(name), *(cell(found, model, name) for model in MODELS)] for name in names]
    return report.table(["method", *MODELS.values()], rows)


def cell(found: dict[tuple[str, str], float], model: str, method: str) -> str:
    """Megabytes, and how many times those of DDP; empty if not measured."""
    if (model, method) not in found:
        return ""
    mb = found[model, method]
    return f"{mb:,.0f} MB, {mb / found[model, 'ddp']:.2f}x"


def resident() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def peak(arguments: argparse.Namespace) -> float:
    """Peak memory of a few steps on this rank, in bytes."""
    device, before = methods.device(), resident()
    torch.manual_seed(0)
    model = methods.network(arguments.model).to(device)
    method = methods.method(arguments.methods, arguments.optimizer, model)
    images, labels = methods.batch(arguments.model, arguments.batch, arguments.size, seed=0)
    for _ in range(arguments.steps):
        method.step(images.to(device), labels.to(device))
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
    parser.add_argument("--size", type=int, default=32, help="pixels per side of an image; tokens of a window")
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
