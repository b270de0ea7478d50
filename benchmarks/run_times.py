"""docs/data/run_times.csv: what a step of each digits recipe takes with each method, on two processes of one machine.

    torchrun --nproc-per-node=2 -m benchmarks.run_times && python -m benchmarks.figures

Every method trains a copy of the network, with the recipe's batch and kind of optimizer. They take turns of eight
steps, so that the machine's noise meets all of them alike, which it does not with the runs for accuracy, spread over
days. Images are random, and warm-ups are left out. One thread a process. Five to twelve minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import report
from benchmarks.latency import Method
from benchmarks.methods import Step, stepper
from lightning_gradcomp.app.models import build

CSV = Path(__file__).parents[1] / "docs" / "data" / "run_times.csv"
HEAD = ("model", "method", "turn", "step_ms", "machine")
METHODS = ("none", "fp16", "bf16", "dgc", "gradient_dropping", "powersgd", "onebit", "terngrad", "twobit", "dga")
BATCH = {"resnet18": 32, "resnet50": 32, "swin_mini": 16}
"""Images of a rank."""
ROUND = 8
"""Steps of a turn: a round of delayed averages, so that each step bears its share of it."""


def trainer(model: str, method: str) -> Step:
    """A step of `model` as the strategies make it."""
    torch.manual_seed(0)  # the same weights on every rank
    network = build(model, channels=1, classes=10, size=8)
    optimizer = torch.optim.AdamW(network.parameters()) if model == "swin_mini" else None
    if method == "dga":
        return Method(method, network, ROUND, optimizer).step
    return stepper(f"{method}@all_gather", network, optimizer)


def measure(model: str, turns: int) -> dict[str, list[float]]:
    """Method -> milliseconds of a step, of the slower rank, in each turn but the first (for buffers and caches)."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    images = torch.randn(BATCH[model], 1, 8, 8, generator=generator)
    labels = torch.randint(0, 10, (BATCH[model],), generator=generator)
    steps = {m: trainer(model, m) for m in METHODS if (model, m) != ("swin_mini", "dgc")}  # which has AdamW
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(turns + 1):
        for method, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(ROUND):
                step(images, labels)
            slower = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(slower, op=dist.ReduceOp.MAX)
            found[method].append(1e3 * slower.item() / ROUND)
    return {method: ms[1:] for method, ms in found.items()}


def read_csv() -> dict[tuple[str, str], list[float]]:
    """Network and method -> milliseconds of a step, in each turn."""
    found = defaultdict(list)
    with CSV.open(newline="") as file:
        for line in csv.DictReader(file):
            found[line["model"], line["method"]].append(float(line["step_ms"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {(model, method): ms for model in BATCH for method, ms in measure(model, turns).items()}
    if dist.get_rank() == 0:
        with CSV.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(HEAD)
            for (model, method), each in found.items():
                writer.writerows([model, method, i, f"{ms:.1f}", report.machine()] for i, ms in enumerate(each))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
