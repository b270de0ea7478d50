"""Milliseconds that averages in few bits take on a CPU, for 25 million elements: by phase, and beside backward.

    python -m benchmarks.few_bits --csv docs/data/few_bits.csv    # about two minutes, alone on two cores

Phases are those of one message of large matrices, beside a copy of the same memory. "beside" columns are what DDP's
step of ResNet-50 takes longer if a thread rounds its buckets while backward computes, on one core and on two. The other
of two ranks is an echo, so nothing waits for a link; torch uses one thread.

Private: `EchoRanks`, the formats, and the thread.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from timeit import repeat
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torchvision
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import lightning_gradcomp as lgc
from benchmarks import report
from lightning_gradcomp.app.plan import EchoRanks
from lightning_gradcomp.averaging.few_bits import first_blocks
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.compressors.blocks import FORMATS
from lightning_gradcomp.plugin import few_bit_buckets

MILLION = 25
ROWS, COLUMNS = 1024, 4096
"""Of the matrix whose phases are timed: small enough for several in a cache of 32 MB, as a part of a bucket is."""
METHODS: dict[str, lgc.EDEN | lgc.Int8 | None] = {
    "torch's fp16 hook": None,
    "`ddp_int8`": lgc.Int8(),
    "`eden`": lgc.EDEN(),
    "`eden` in 2 bits": lgc.EDEN(bits=2),
}


def milliseconds(call: Callable[[], Any], repeats: int) -> float:
    """The median time of a call."""
    return 1e3 * median(repeat(call, number=1, repeat=repeats))


def phases(wire: str, repeats: int = 9) -> list[float]:
    """Milliseconds to copy, to lay out (EDEN: to rotate), to pack, and to unpack, for `MILLION` million elements."""
    form, matrix = FORMATS[wire], torch.randn(ROWS, COLUMNS)
    blocks, copy = torch.empty(matrix.numel()), torch.empty_like(matrix)
    packed = torch.empty(form.nbytes(len(blocks)), dtype=torch.uint8)
    seeds = torch.arange(len(blocks) // form.block, dtype=torch.int32)
    calls = [
        lambda: copy.copy_(matrix),
        lambda: form.put([matrix], [blocks], (1,)),
        lambda: form.pack(blocks, packed, seeds),
        lambda: form.unpack(packed, blocks, (1,)),
    ]
    return [milliseconds(call, repeats) * MILLION * 1e6 / len(blocks) for call in calls]


def beside_backward(cores: int, turns: int) -> list[float]:
    """How many milliseconds, for `MILLION` million elements, DDP's step takes longer with each of `METHODS`."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])  # of this thread and those that it starts
    wrapped = [ddp() for _ in range(1 + len(METHODS))]
    for each, compressor in zip(wrapped[1:], METHODS.values(), strict=True):
        if compressor:
            each.register_comm_hook(*hook(each.module, compressor))
        else:
            each.register_comm_hook(None, default_hooks.fp16_compress_hook)
    images, labels = torch.randn(4, 3, 64, 64), torch.arange(4)

    def seconds(model: DistributedDataParallel) -> float:
        begin = time.perf_counter()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        return time.perf_counter() - begin

    times = [[seconds(each) for each in wrapped] for _ in range(2 + turns)][2:]  # DDP changes its buckets once
    alone, *others = map(median, zip(*times, strict=True))
    elements = sum(parameter.numel() for parameter in wrapped[0].parameters())
    return [1e3 * (each - alone) * MILLION * 1e6 / elements for each in others]


def ddp() -> DistributedDataParallel:
    return DistributedDataParallel(torchvision.models.resnet50(), gradient_as_bucket_view=True)


def hook(model: torch.nn.Module, compressor: lgc.EDEN | lgc.Int8) -> tuple[Any, Callable[..., Any]]:
    """The state and hook that average a model's buckets in few bits."""
    form = FORMATS[compressor.wire]
    first = first_blocks(form, Gradients(model, compressor).chosen)
    large = {id(p): first[name] for name, p in model.named_parameters() if name in first}
    buckets = few_bit_buckets.FewBitBuckets(form, large, torch.device("cpu"))
    return buckets, lambda state, bucket: state.average(bucket, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--csv", type=Path, help="the file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="tcp://localhost:0", rank=0, world_size=1)
    with patch.object(few_bit_buckets, "Ranks", lambda group: EchoRanks(None, 2)):
        two, one = (beside_backward(cores, arguments.turns) for cores in (2, 1))
    head = ["25 million elements, ms", "copy", "lay out", "pack", "unpack", "beside, one core", "beside, two cores"]
    rows = []
    for (name, how), *beside in zip(METHODS.items(), one, two, strict=True):
        numbers = phases(how.wire) if how else [""] * 4
        rows.append([name, *(each if each == "" else round(each) for each in (*numbers, *beside))])
    print(report.machine())
    print(report.table(head, rows))
    if arguments.csv:
        report.write(arguments.csv, [dict(zip(head, row, strict=True)) for row in rows])


if __name__ == "__main__":
    main()
