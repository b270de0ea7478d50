"""What a training step costs, by method, in milliseconds and as a ratio to computation alone; peers included.

    torchrun --nproc-per-node=2 -m benchmarks.step_time --methods compute,ddp,dgc,powersgd
    python -m benchmarks.link --rate-mbit 1000 -- python -m benchmarks.step_time --record 1000  # docs/data/step_times.csv

Every method trains a copy of the model. They take turns, a few steps each, so that the machine's noise meets all of
them alike; figures are medians over all steps of all turns, of the slower rank. Images are random, weights are trained
as usual (SGD with momentum, or AdamW), and warm-ups are left out: what is timed is the compressed phase. One thread a
process. On a GPU where there is one; its ranks exchange by gloo all the same, since NCCL refuses two on one GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from matplotlib.axes import Axes

from benchmarks import report, started
from benchmarks.methods import OPTIMIZERS, Switched, network, stepper
from benchmarks.step_times import StepTime, record
from lightning_gradcomp.averaging import Stats

METHODS = "compute,ddp,fp16_hook,powersgd_hook," + ",".join(
    f"{method}@all_gather" for method in ("dgc", "gradient_dropping", "powersgd", "onebit", "twobit", "terngrad")
)
PHASES = ("compress", "exchange", "decompress")


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Method -> median milliseconds of a step, spread over the turns, ratio to computation, what the exchange cost."""
    rank, device, generator = dist.get_rank(), started.device(), torch.Generator().manual_seed(dist.get_rank())
    images = torch.randn(arguments.batch, 3, arguments.size, arguments.size, generator=generator).to(device)
    labels = torch.randint(0, 10, (arguments.batch,), generator=generator).to(device)
    steps = {}
    for method in arguments.methods.split(","):
        torch.manual_seed(0)  # the same weights on every rank
        model = network(arguments.model).to(device)
        steps[method] = stepper(method, model, OPTIMIZERS[arguments.optimizer](model))
    for method, step in steps.items():
        if isinstance(step, Switched) and step.averager.autotune:
            while not step.averager.autotune.outcome:
                step(images, labels)
            if rank == 0:
                print(f"{method}: {step.averager.autotune.outcome}", flush=True)
    seconds: dict[str, list[list[float]]] = {method: [] for method in steps}
    costs: dict[str, list[Stats | None]] = {method: [] for method in steps}
    for turn in range(arguments.turns + 1):
        for method, step in steps.items():
            own = []
            for _ in range(arguments.steps):
                dist.barrier()
                begin = time.perf_counter()
                costs[method].append(step(images, labels))
                started.wait(device)
                own.append(time.perf_counter() - begin)
            slower = torch.tensor(own)
            dist.all_reduce(slower, op=dist.ReduceOp.MAX)
            if turn:  # the first is for buffers, buckets and caches
                seconds[method].append(slower.tolist())
        if rank == 0:
            print(f"turn {turn} of {arguments.turns}", flush=True)
    results = {}
    for method, turns in seconds.items():
        medians = [1e3 * median(turn) for turn in turns]
        results[method] = {
            "ms": 1e3 * median(second for turn in turns for second in turn),
            "lowest_turn_ms": min(medians),
            "highest_turn_ms": max(medians),
        }
        counted = [cost for cost in costs[method][arguments.steps :] if cost]
        if counted:
            results[method]["bytes_sent"] = counted[-1].bytes_sent
            results[method] |= {f"{phase}_ms": 1e3 * median(c.seconds[phase] for c in counted) for phase in PHASES}
    for result in results.values():
        result["ratio_to_compute"] = result["ms"] / results["compute"]["ms"] if "compute" in results else float("nan")
    return results


def rows(results: dict[str, dict[str, float]]) -> list[list[str]]:
    """For the table."""
    lines = []
    for method, r in results.items():
        spread = f"{r['ms']:.1f} ({r['lowest_turn_ms']:.1f} to {r['highest_turn_ms']:.1f})"
        counted = "bytes_sent" in r
        phases = ", ".join(f"{r[f'{phase}_ms']:.0f}" for phase in PHASES) if counted else ""
        lines.append(
            [method, spread, f"{r['ratio_to_compute']:.2f}x", phases, f"{r['bytes_sent']:,}" if counted else ""]
        )
    return lines


def recorded(results: dict[str, dict[str, float]], rate_mbit: int) -> list[StepTime]:
    """Lines of docs/data/step_times.csv."""
    compute = results["compute"]["ms"]
    return [
        StepTime(
            rate_mbit=rate_mbit,
            method=method,
            ms=round(r["ms"], 1),
            compute_ms=round(compute, 1),
            bytes_sent=int(r["bytes_sent"]) if "bytes_sent" in r else None,
            **{f"{phase}_ms": round(r[f"{phase}_ms"], 1) if "bytes_sent" in r else None for phase in PHASES},
            machine=report.machine(),
        )
        for method, r in results.items()
    ]


def draw(results: dict[str, dict[str, float]]) -> Callable[[Axes], None]:
    """Bars, with the range of the turns."""

    def on(axes: Axes) -> None:
        middle = [r["ms"] for r in results.values()]
        reach = [
            [r["ms"] - r["lowest_turn_ms"] for r in results.values()],
            [r["highest_turn_ms"] - r["ms"] for r in results.values()],
        ]
        axes.barh(list(results), middle, xerr=reach, color="tab:blue")
        axes.invert_yaxis()
        axes.set(xlabel="ms a step (median; lowest and highest turn)")

    return on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--model", default="torchvision.resnet18", help="or a name of the recipes', as resnet18")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--size", type=int, default=32, help="pixels of an image's side")
    parser.add_argument("--batch", type=int, default=32, help="images a rank and step")
    parser.add_argument("--steps", type=int, default=5, help="steps a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a folder for step_time.json and step_time.png")
    parser.add_argument("--record", type=int, help="into docs/data/step_times.csv, as of a link of so many Mbit/s")
    arguments = parser.parse_args()
    if arguments.record and "compute" not in arguments.methods.split(","):
        parser.error("--record needs compute among the --methods, for the ratio to it")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = measure(arguments)
    if dist.get_rank() == 0:
        conditions = {**vars(arguments), "N": dist.get_world_size()}
        print(f"\n{arguments.model} at {arguments.size}x{arguments.size}, batch {arguments.batch}, ", end="")
        print(f"N={conditions['N']}, {report.machine()}")
        head = [
            "method",
            "ms a step (lowest to highest turn)",
            "to computation",
            "of it " + ", ".join(PHASES),
            "bytes sent",
        ]
        print(report.table(head, rows(results)))
        report.write(arguments.out, "step_time", results, conditions, draw(results))
        if arguments.record:
            record(recorded(results, arguments.record))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
