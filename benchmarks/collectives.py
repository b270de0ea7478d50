"""Every collective that lightning_gradcomp uses, in a group of one rank: works, or the error that it raises.

    python -m benchmarks.collectives --backend nccl --csv nccl.csv

One GPU is enough for NCCL with one rank. That shows which collectives, dtypes and shapes the backend accepts, and not
how several ranks exchange. Each call is the package's own function where that can be called alone, then a compressed
step of each method by each topology, and a step of DDP and of rounds. Lines are written one by one, so a call that
hangs is the one after the last line.

Private: internal functions of `averaging`, `local_sgd` and `plugin`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import lightning_gradcomp as lgc
from benchmarks import methods, report
from benchmarks.encode import LOSSY, Compression
from lightning_gradcomp.averaging.ranks import Nodes, Ranks, subgroup
from lightning_gradcomp.averaging.replicas import broadcast as broadcast_tensors
from lightning_gradcomp.averaging.replicas import broadcast_unless_identical, compare_replicas, identical
from lightning_gradcomp.averaging.topology import PARTITIONED
from lightning_gradcomp.local_sgd.background import BackgroundExchange
from lightning_gradcomp.local_sgd.sync import weighted_means
from lightning_gradcomp.plugin import sigterm
from lightning_gradcomp.plugin.checkpoint_files import of_rank_zero

TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of the CSV: one call."""

    number: int
    backend: str
    collective: str
    tensors: str  # dtype and shape
    used_by: str  # file in lightning_gradcomp
    works: bool
    ms: float  # including what the first call sets up
    error: str | None
    machine: str


class Call(NamedTuple):
    """A collective, and how to call it."""

    collective: str
    tensors: str
    used_by: str
    call: Callable[[], object]


def calls(group: dist.ProcessGroup, device: torch.device, elements: int) -> Iterator[Call]:
    """All calls; large tensors have `elements` elements."""
    yield from of_ranks(group, device, elements)
    yield from of_replicas(group, device, elements)
    yield from of_other_groups(group, device, elements)
    yield from of_the_plugin(group, device, elements)
    yield from whole_steps(device)


def of_ranks(group: dist.ProcessGroup, device: torch.device, elements: int) -> Iterator[Call]:
    """A step's messages."""
    used, ranks = "averaging/ranks.py", Ranks(group)
    for length in (1, 1_003, elements + 3):
        message = torch.ones(length, dtype=torch.uint8, device=device)
        yield Call("all-gather, async", f"uint8 [{length}]", used, partial(ranks.gather, message))
        yield Call("all-to-all of given sizes", f"uint8 [{length}]", used, partial(ranks.scatter, [message]))
        equal = partial(dist.all_to_all_single, message.clone(), message, group=group)
        yield Call("all-to-all", f"uint8 [{length}]", used, equal)
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    yield Call("all-gather, async", "uint8 [0]", used, partial(ranks.gather, empty))
    floats = torch.ones(elements, device=device)
    yield Call("all-to-all", f"fp32 [{elements}]", used, partial(dist.all_to_all_single, floats.clone(), floats))
    for length in (16, elements):
        values = torch.ones(length, device=device)
        yield Call("all-reduce, sum", f"fp32 [{length}]", used, partial(dist.all_reduce, values, group=group))
        yield Call("all-reduce, max", f"fp32 [{length}]", used, partial(ranks.maximum, values))
    for name, dtype in {"bf16": torch.bfloat16, "fp16": torch.float16}.items():
        values = torch.ones(elements, dtype=dtype, device=device)
        yield Call("all-reduce, sum", f"{name} [{elements}]", used, partial(dist.all_reduce, values, group=group))
    times = torch.ones(12, dtype=torch.float64, device=device)
    largest = partial(dist.all_reduce, times, op=dist.ReduceOp.MAX, group=group)
    yield Call("all-reduce, max", "fp64 [12]", "averaging/autotune.py", largest)


def of_replicas(group: dist.ProcessGroup, device: torch.device, elements: int) -> Iterator[Call]:
    """Comparing and copying parameters, buffers and moments."""
    used, ranks = "averaging/replicas.py", Ranks(group)
    mixed = [torch.ones(elements, device=device), torch.ones((), dtype=torch.int64, device=device)]
    mixed += [torch.ones(7, 3, dtype=torch.float16, device=device), torch.ones(5, dtype=torch.bool, device=device)]
    yield Call("all-gather of digests", "uint8 [32]", used, partial(identical, mixed, group))
    named = [(str(number), tensor) for number, tensor in enumerate(mixed)]
    yield Call("all-gather of checksums", "int64 [4]", used, partial(compare_replicas, named, 0, group))
    yield Call("broadcast", "uint8, mixed tensors", used, partial(broadcast_tensors, mixed, ranks))
    yield Call(
        "broadcast if they differ", "uint8, mixed tensors", used, partial(broadcast_unless_identical, mixed, ranks)
    )
    means = partial(weighted_means, ranks, [(mixed[0], 3), (mixed[0], 0)])
    yield Call("all-gather of counts, all-reduce", f"int64 [2], fp32 [{elements}]", "local_sgd/sync.py", means)
    yield Call("broadcast of a buffer", "fp32 [64]", "app/task.py", partial(dist.broadcast, mixed[0][:64], src=0))


def of_other_groups(group: dist.ProcessGroup, device: torch.device, elements: int) -> Iterator[Call]:
    """Groups made from others, groups of nodes, and a group of a background thread."""

    def inside_nodes(call: Callable[[Nodes], object]) -> object:
        return call(Nodes(group, 1))

    used, floats = "averaging/ranks.py", torch.ones(elements, device=device)
    yield Call("new_group of members", "", used, partial(subgroup, group, [0]))
    for name, call in {
        "average_inside": lambda nodes: nodes.average_inside([floats], [True]),
        "gather": lambda nodes: nodes.gather(floats.view(torch.uint8)),
        "scatter": lambda nodes: nodes.scatter([floats.view(torch.uint8)]),
        "add": lambda nodes: nodes.add(floats),
        "maximum": lambda nodes: nodes.maximum(floats),
    }.items():
        yield Call(f"inside='dense': {name}", f"fp32 [{elements}]", used, partial(inside_nodes, call))

    def in_background() -> None:
        own = dist.new_group(timeout=TIMEOUT)
        exchange = BackgroundExchange(partial(dist.all_reduce, floats, group=own), 0, device)
        dist.all_reduce(floats.clone(), group=group)
        exchange.wait()

    used = "local_sgd/background.py"
    yield Call("all-reduce in a thread, on its own stream and group", f"fp32 [{elements}]", used, in_background)


def of_the_plugin(group: dist.ProcessGroup, device: torch.device, elements: int) -> Iterator[Call]:
    """What strategies, checkpoints and hooks of DDP use."""
    floats, model = torch.ones(elements, device=device), torch.nn.Linear(300, 200).to(device)
    yield Call("all-reduce, max", "uint8 [3]", "plugin/sigterm.py", partial(sigterm.meet, device))
    count = floats[:1]
    yield Call("all-gather", "fp32 [1]", "plugin/validation.py", partial(Ranks(group).gather, count))
    yield Call("barrier", "", "plugin/rank_states.py", dist.barrier)
    if device.type == "cuda":
        yield Call("barrier with device_ids", "", "Lightning's DDPStrategy", partial(dist.barrier, device_ids=[0]))
    yield Call("broadcast_object_list", "str", "plugin/checkpoint_files.py", partial(of_rank_zero, "a path"))
    state = {"residual": floats.cpu(), "device": floats}
    gathered = partial(dist.gather_object, state, [None], dst=0)
    yield Call("gather_object", "dict of tensors", "plugin/rank_states.py", gathered)
    everyone = partial(dist.all_gather_object, [None], ("10.0.0.1", 29500))
    yield Call("all_gather_object", "tuple", "plugin/async_strategy.py", everyone)

    def arrived() -> torch.Tensor:
        future = dist.all_reduce(floats.to(torch.bfloat16), async_op=True).get_future()
        return future.then(lambda done: floats.copy_(done.value()[0])).wait()

    used = "plugin/ddp_hook.py"
    yield Call("all-reduce, async, its future", f"bf16 [{elements}]", used, arrived)

    def hooked() -> None:
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        ddp.register_comm_hook(group, allreduce_hook)
        ddp(torch.ones(4, 300, device=device)).sum().backward()

    yield Call("DDP's backward with a hook", "fp32 [60200]", used, hooked)


def whole_steps(device: torch.device) -> Iterator[Call]:
    """Two steps of each method: compressed by each topology, then as a user would run it."""
    for name in LOSSY:
        for topology in ("all_gather", *PARTITIONED):
            if topology == "all_gather" or not methods.compressor(name).not_partitioned_because:  # type: ignore[union-attr]
                call = partial(compressed_steps, name, topology, device)
                yield Call(f"compressed steps of {name}", topology, "averaging/step.py", call)
    for name in ("ddp", "fp16_hook", "powersgd_hook", "dgc@all_gather", "local", "dga:onebit"):
        yield Call(f"training steps of {name}", "", "benchmarks/methods.py", partial(training_steps, name, device))


def compressed_steps(name: str, topology: str, device: torch.device) -> None:
    group = dist.group.WORLD
    assert group is not None
    compression = Compression(name, "sgd", methods.small().to(device), Ranks(group), topology)
    for _ in range(2):
        compression.new_gradients()
        compression.average(lgc.Stats())


def training_steps(name: str, device: torch.device) -> None:
    images = torch.randn(4, 3, 32, 32, device=device)
    labels = torch.randint(0, 10, (4,), device=device)
    method = methods.method(name, "sgd", methods.small().to(device), period=2)
    for _ in range(4):
        method.step(images, labels)


def line(number: int, backend: str, call: Call, device: torch.device) -> Line:
    """Make the call."""
    print(f"{number}: {call.collective}, {call.tensors}", flush=True)
    begin, error = time.perf_counter(), None
    try:
        call.call()
        methods.wait(device)
    except Exception as raised:  # a line of the CSV
        error = f"{type(raised).__name__}: {raised}"
        print(error, flush=True)
    return Line(
        number=number,
        backend=backend,
        collective=call.collective,
        tensors=call.tensors,
        used_by=call.used_by,
        works=error is None,
        ms=round(1e3 * (time.perf_counter() - begin), 2),
        error=error,
        machine=report.machine(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--elements", type=int, default=11_200_000, help="of large tensors")
    parser.add_argument("--csv", type=Path, required=True, help="add to this file")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if arguments.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1"}
    dist.init_process_group(arguments.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    found = []
    for number, call in enumerate(calls(group, device, arguments.elements)):
        found.append(line(number, arguments.backend, call, device))
        report.write(arguments.csv, found)
    print(f"{sum(each.works for each in found)} of {len(found)} work", flush=True)
    os._exit(0)  # a group in which a call failed may not end


if __name__ == "__main__":
    main()
