"""What a step of a sharded model costs between replicas: milliseconds, bytes as the kernel counts them, memory.

    python -m benchmarks.link --nodes 2 --ranks-per-node 2 --rate-mbit 1000 -- python -m benchmarks.hsdp

A node is a replica, and its ranks are its shards. "hsdp" is FSDP2's own, whose replicas all-reduce every gradient;
"hsdp+dgc" is FSDP2 inside a replica and `GradientAverager` between them; "ddp" has no shards. Methods take turns, a few
steps each, with a copy of the model each; figures are medians, of the slowest rank. Bytes are what a node has sent, by
the counter of its interface. With one method, what a rank needed at most beyond what it had before its model was made
is printed too. One thread a process.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lightning_gradcomp as lgc
from benchmarks import report
from benchmarks.memory import resident
from benchmarks.methods import OPTIMIZERS, compressor, forward_backward, network

COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    """The model with each of its larger modules sharded by itself, as a model of many blocks would be."""
    for module in reversed(list(model.modules())):
        own = sum(parameter.numel() for parameter in module.parameters())
        if module is not model and own > 2_000_000 and not isinstance(module, nn.Sequential):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def stepper(method: str, arguments: argparse.Namespace) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A step of `method` on (images, labels)."""
    torch.manual_seed(0)
    model = network(arguments.model)
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (dist.get_world_size() // per_node, per_node), mesh_dim_names=("replicate", "shard"))
    name, _, compressed = method.partition("+")
    model = DistributedDataParallel(model) if name == "ddp" else sharded(model, mesh["shard"] if compressed else mesh)
    optimizer = OPTIMIZERS[arguments.optimizer](model)
    averager = None
    if compressed:
        group = mesh.get_group("replicate")
        averager = lgc.GradientAverager(model, compressor(compressed), optimizer=optimizer, process_group=group)
        if dist.get_rank() == 0:
            print(f"{method}: {averager.describe()}", flush=True)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        forward_backward(model, images, labels)
        (averager or optimizer).step()

    return step


def sent() -> int:
    """Bytes that this node has sent to others, headers included; 0 where it has no such interface."""
    return int(COUNTER.read_text()) if COUNTER.exists() else 0


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Method -> median milliseconds of a step, median bytes of a step from this node, and the range of the turns."""
    generator, found = torch.Generator().manual_seed(dist.get_rank()), {}
    images = torch.randn(arguments.batch, 3, arguments.size, arguments.size, generator=generator)
    labels = torch.randint(0, 10, (arguments.batch,), generator=generator)
    steps = {method: stepper(method, arguments) for method in arguments.methods.split(",")}
    seconds: dict[str, list[float]] = {method: [] for method in steps}
    crossed: dict[str, list[int]] = {method: [] for method in steps}
    for turn in range(arguments.turns + 1):
        for method, step in steps.items():
            for _ in range(arguments.steps):
                dist.barrier()
                before, begin = sent(), time.perf_counter()
                step(images, labels)
                own = torch.tensor([time.perf_counter() - begin])
                count = sent() - before
                dist.all_reduce(own, op=dist.ReduceOp.MAX)
                if turn:  # the first is for buffers and caches
                    seconds[method].append(own.item())
                    crossed[method].append(count)
    for method in steps:
        ms = [1e3 * second for second in seconds[method]]
        found[method] = {"ms": median(ms), "lowest": min(ms), "highest": max(ms), "bytes": median(crossed[method])}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="hsdp,hsdp+dgc,hsdp+powersgd,ddp")
    parser.add_argument("--model", default="torchvision.swin_t", help="as in benchmarks.step_time")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--size", type=int, default=64, help="pixels of an image's side")
    parser.add_argument("--batch", type=int, default=4, help="images a rank and step")
    parser.add_argument("--steps", type=int, default=2, help="steps a turn")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    before = resident()
    found = measure(arguments)
    peak = torch.tensor([1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before])
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"\n{arguments.model} at {arguments.size}x{arguments.size}, batch {arguments.batch}, ", end="")
        print(f"{arguments.optimizer}, N={dist.get_world_size()}, {report.machine()}")
        rows = [
            [method, f"{r['ms']:.0f} ({r['lowest']:.0f} to {r['highest']:.0f})", f"{r['bytes']:,.0f}"]
            for method, r in found.items()
        ]
        print(report.table(["method", "ms a step (lowest to highest)", "bytes a node sends a step"], rows))
        if len(found) == 1:
            print(f"a rank needed {peak.item() / 1e6:,.0f} MB at most")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
