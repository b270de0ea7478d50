"""Memory of a GPU by method: the peak of a training step and the averager's state.

    python -m benchmarks.link --rate-mbit 0 -- python -m benchmarks.gpu_memory --csv memory.csv

Two ranks share the GPU and exchange over gloo. Methods run one after the other, warm-ups are skipped, and lines are of
rank 0, which counts what its own process allocated. `benchmarks.memory` measures CPUs; there, only the state is counted
here.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import lightning_gradcomp as lgc
from benchmarks import memory, methods, report

METHODS = "compute,ddp,fp16_hook,powersgd_hook," + ",".join(
    f"{method}@all_gather" for method in ("dgc", "gradient_dropping", "powersgd", "onebit", "twobit", "terngrad")
)


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """A line of the CSV: MB of one method on one rank."""

    model: str
    optimizer: str
    method: str
    peak_mb: float | None  # allocated on the GPU, with weights, gradients and activations
    between_steps_mb: float | None  # allocated on the GPU after a step
    state_mb: float | None  # of the averager
    machine: str


def measure(arguments: argparse.Namespace, name: str) -> GpuMemory:
    """A few steps of one method. Collective."""
    device = methods.device()
    on_gpu = device.type == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else 0  # by earlier methods, which DDP's C++ keeps
    method = memory.trained(arguments, name)
    state: list[torch.Tensor] = []
    after = torch.cuda.memory_allocated(device) if on_gpu else 0
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    if isinstance(method.averager, lgc.GradientAverager):
        kinds = method.averager.state_dict()["memory"]
        state = [tensor for parts in kinds.values() for tensor in parts.values()]
    return GpuMemory(
        model=arguments.model,
        optimizer=arguments.optimizer,
        method=name.partition("@")[0],
        peak_mb=_mb(peak - before) if on_gpu else None,
        between_steps_mb=_mb(after - before) if on_gpu else None,
        state_mb=_mb(sum(tensor.nbytes for tensor in state)) if method.averager else None,
        machine=report.machine(),
    )


def _mb(num_bytes: int) -> float:
    return round(num_bytes / 1e6, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=METHODS, help="as in benchmarks/methods.py")
    parser.add_argument("--model", default="torchvision.resnet50")
    parser.add_argument("--optimizer", choices=methods.OPTIMIZERS, default="sgd")
    parser.add_argument("--size", type=int, default=224, help="pixels per side of an image")
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--csv", type=Path, required=True, help="add to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in arguments.methods.split(","):
        line = measure(arguments, name)
        if dist.get_rank() == 0:
            print(line, flush=True)
            report.record(arguments.csv, [line], lambda each: (each.model, each.optimizer, each.method))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
