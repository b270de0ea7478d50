"""Launches in a compressed step of ResNet-50 on a GPU, counted without one.

    python -m benchmarks.launches --csv docs/data/launches.csv    # half a minute

Tensors hold no data (FakeTensorMode). An operation of torch counts once,
even if it runs several kernels, as topk and sort do. The step is the third of one of two ranks, from the local
gradients to the averages in `p.grad`, without the exchange. In few bits, DDP's first bucket is averaged.

Private: `average_compressed` and what it needs; the names that are replaced.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torchvision
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import lightning_gradcomp as lgc
from benchmarks import report
from lightning_gradcomp.app.plan import EchoRanks
from lightning_gradcomp.averaging.exchange import CALLER_FLAGS, Extras, Flags
from lightning_gradcomp.averaging.few_bits import mean_in_few_bits
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.memory import Memory
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.step import average_compressed
from lightning_gradcomp.averaging.topology import Topology
from lightning_gradcomp.compressors import terngrad, twobit
from lightning_gradcomp.compressors.blocks import FORMATS
from lightning_gradcomp.compressors.kernels import bits, eden, rng, rows, topk

ATEN = torch.ops.aten
NOTHING = {ATEN.empty, ATEN.empty_like, ATEN.new_empty, ATEN.empty_strided, ATEN._unsafe_view}
"""Allocations, and a view that its schema does not call one."""
BUCKET = 25 * 2**20
"""Bytes in a DDP bucket."""
OPTIMIZERS = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}


class Echo(Ranks):
    """A world of two in which the other rank says what this one says."""

    def __init__(self) -> None:
        super().__init__(None, world=2)

    def start_gather(self, message: torch.Tensor) -> Any:
        return lambda: message.expand(2, -1)

    def scatter(self, messages: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([messages[0], messages[0]])


class Launches(TorchDispatchMode):
    """Counts torch's operations on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        on_gpu = any(leaf.is_cuda for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor))
        self.count += on_gpu and not launches_nothing(op)
        return result


def reading(extras: Extras, finite: torch.Tensor) -> tuple[bool, list[bool]]:
    """`Extras.read` without data: all is finite, and every parameter has a gradient."""
    assert extras.combined is not None
    torch.cat([extras.combined, finite.view(1)])
    return True, [True] * (extras.count - 1 - CALLER_FLAGS) + [False] * CALLER_FLAGS


def launches_nothing(op: Any) -> bool:
    """True for views and allocations."""
    returned = [each.alias_info for each in op._schema.returns]
    is_view = any(alias and not alias.is_write for alias in returned)
    return is_view or op.namespace != "aten" or op.overloadpacket in NOTHING


@contextmanager
def counting() -> Iterator[Launches]:
    """Inside, tensors hold no data, and launches are counted. Tables without data are forgotten at the end."""
    launches, encode_zeros = Launches(), lgc.TensorCodec._encode_zeros
    tables = [
        each for module in (bits, eden, rng, rows, terngrad, twobit, topk) for each in vars(module).values()
        if hasattr(each, "cache_clear")
    ]  # fmt: skip

    def encode_data(*arguments: Any) -> Any:
        with unset_fake_temporarily(), _disable_current_modes():
            return encode_zeros(*arguments)

    patches = [
        patch.object(lgc.TensorCodec, "_encode_zeros", encode_data),
        patch.object(dist, "all_reduce", lambda tensor, **options: None),
        patch.object(Extras, "read", reading),
        patch.object(rng.Uniform, "__init__", lambda self, device, *key: setattr(self, "_device", device)),
        patch.object(rng.Uniform, "draw", lambda self, n, begin: torch.rand(n, device=self._device).add_(begin)),
    ]
    for table in tables:
        table.cache_clear()
    with FakeTensorMode():
        for each in patches:
            each.start()
        try:
            yield launches
        finally:
            for each in patches:
                each.stop()
            for table in tables:
                table.cache_clear()


def of_a_step(compressor: lgc.LossyCompressor, optimizer: str) -> int:
    """Launches in a step of ResNet-50, at the compressor's final sparsity."""
    with counting() as launches:
        with torch.device("cuda"):
            model = torchvision.models.resnet50()
        stepped = OPTIMIZERS[optimizer](model.parameters(), lr=0.1, weight_decay=0.01)
        how = compressor.for_optimizer(stepped)
        memory = Memory(how, Gradients(model, how), Echo(), Topology(), stepped)
        how = how.with_sparsity(how.final_sparsity)
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter)
            launches.count = 0
            with launches:
                average = average_compressed(memory, how, "all_gather", step, Flags(), lgc.Stats())
                assert average.commit is not None
                average.commit(average.names)
        return launches.count


def of_a_bucket(compressor: lgc.EDEN | lgc.Int8, world: int) -> int:
    """Launches in an average in few bits of the first bucket of ResNet-50, 25 MB or more, on one of `world` ranks."""
    form = FORMATS[compressor.wire]
    with counting() as launches:
        with torch.device("cuda"):
            model = torchvision.models.resnet50()
        chosen = Gradients(model, compressor).chosen
        ends = accumulate(p.numel() for p in reversed(list(model.parameters())))
        number = 1 + sum(4 * end < BUCKET for end in ends)
        bucket = list(model.named_parameters())[-number:]
        large = [(0, p) for name, p in bucket if name in chosen]
        small = [p for name, p in bucket if name not in chosen]
        for key in range(2):
            launches.count = 0
            with launches, torch.no_grad():
                mean_in_few_bits(EchoRanks(None, world), form, large, small, key)
        return launches.count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="the file to write")
    arguments = parser.parse_args()
    head = ["method", "optimizer", "launches"]
    lossy = [entry for entry in lgc.entries() if issubclass(entry.cls, lgc.LossyCompressor)]
    cases = [(entry, optimizer) for entry in lossy for optimizer in (OPTIMIZERS if entry.name == "dgc" else ["SGD"])]
    rows = [[f"`{entry.name}`", optimizer, of_a_step(entry.cls(), optimizer)] for entry, optimizer in cases]
    few_bits = [("int8", lgc.Int8()), *((f"eden bits={bits}", lgc.EDEN(bits=bits)) for bits in (2, 4))]
    rows += [
        [f"`{name}`, a bucket of {world} ranks", "any", of_a_bucket(compressor, world)]
        for name, compressor in few_bits
        for world in (2, 4)
    ]
    print(report.table(head, [list(map(str, row)) for row in rows]))
    if arguments.csv:
        report.write(arguments.csv, [dict(zip(head, row, strict=True)) for row in rows])


if __name__ == "__main__":
    main()
