"""Bytes of one compressed step, by network and method, and by number of ranks, from the formula.

    python -m benchmarks.wire                    # half a minute; compares with the papers' figures
    python -m benchmarks.wire --ranks 2,8,64 --csv docs/data/bytes_by_ranks.csv

Message lengths follow from shapes and options alone. --ranks prints MB by number of ranks. Methods that
compress by topology have a row for each.

Private: the byte formulas of `averaging`, as in docs/tables.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torchvision

import lightning_gradcomp as lgc
from benchmarks import methods, report
from lightning_gradcomp.app.models import resnet18
from lightning_gradcomp.averaging.gradients import Gradients, Layouts
from lightning_gradcomp.averaging.ranks import Ranks, dense_traffic
from lightning_gradcomp.averaging.topology import dense_step_traffic, traffic

MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "ResNet-18, 32x32, 10 classes": partial(resnet18, channels=3, classes=10),
    "ResNet-50, 224x224, 1,000 classes": torchvision.models.resnet50,
    "Swin-T, 224x224, 1,000 classes": torchvision.models.swin_t,
}
METHODS: dict[str, lgc.LossyCompressor] = {
    "dgc": lgc.DGC(),
    "dgc, bf16": lgc.DGC(values="bf16", dense_values="bf16"),
    "dgc, int8": lgc.DGC(values="int8", dense_values="bf16"),
    "dgc at 99 %": lgc.DGC(sparsity=0.99),
    "gradient_dropping": lgc.GradientDropping(),
    "powersgd, rank 1": lgc.PowerSGD(rank=1),
    "powersgd, rank 2": lgc.PowerSGD(rank=2),
    "powersgd, rank 4": lgc.PowerSGD(),
    "onebit": lgc.OneBit(),
    "terngrad": lgc.TernGrad(),
    "twobit": lgc.TwoBit(),
}
PUBLISHED = {
    ("dgc", "ResNet-50"): "277x (Lin et al. 2018, table 3)",
    ("powersgd, rank 1", "ResNet-18"): "243x (Vogels et al. 2019, table 3)",
    ("powersgd, rank 2", "ResNet-18"): "136x",
    ("powersgd, rank 4", "ResNet-18"): "72x",
    ("terngrad", "ResNet-18"): "20.2x, 32 / log2 3 (Wen et al. 2017)",
    ("onebit", "ResNet-18"): "32x, without scales",
    ("twobit", "ResNet-18"): "16x (MXNet)",
}
TOPOLOGIES = ("all_gather", "two_phase", "server")


def sent(compressor: lgc.Compressor, gradients: Layouts, world: int, topology: str) -> int:
    """Bytes of a step after the warm-up, for the rank that sends the most. 8, 16 and few bits have no topology."""
    ranks = Ranks(None, world)
    if isinstance(compressor, lgc.LossyCompressor):
        return traffic(compressor.with_sparsity(compressor.final_sparsity), gradients, ranks, topology)
    return dense_step_traffic(gradients, ranks, compressor.wire)


def row(name: str, method: str, compressor: lgc.LossyCompressor, model: torch.nn.Module) -> list[str]:
    """A row of the table: one step at N=2."""
    gradients = Gradients(model, compressor)
    step = sent(compressor, gradients, 2, "all_gather")
    ratio = dense_traffic(gradients.nbytes, 2) / step
    return [name, method, f"{step:,}", f"{ratio:.0f}x", PUBLISHED.get((method, name.partition(",")[0]), "")]


def by_ranks(arguments: argparse.Namespace) -> None:
    """Print MB by number of ranks, and write them to the CSV."""
    worlds = [int(world) for world in arguments.ranks.split(",")]
    model = methods.network(arguments.model)
    num_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    found = {"dense ring all-reduce": [dense_traffic(num_bytes, world) for world in worlds]}
    for method in arguments.methods.split(","):
        compressor = methods.compressor(method)
        gradients = Gradients(model, compressor)
        for topology in TOPOLOGIES if isinstance(compressor, lgc.LossyCompressor) else ("",):
            name = f"`{method}` by {topology}" if topology else f"`{method}`"
            found[name] = [sent(compressor, gradients, world, topology) for world in worlds]
    head = ["MB that a rank sends", *(f"N = {world}" for world in worlds)]
    rows = [[name, *(f"{size / 1e6:.3g}" for size in sizes)] for name, sizes in found.items()]
    print(report.table(head, rows))
    if arguments.csv:
        report.write(arguments.csv, [dict(zip(head, row, strict=True)) for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", help="numbers of ranks, for the table by topology")
    parser.add_argument("--methods", default="dgc,onebit,eden,int8", help="of that table, as in benchmarks/methods.py")
    parser.add_argument("--model", default="torchvision.resnet18", help="network of that table")
    parser.add_argument("--csv", type=Path, help="the file to write that table to")
    arguments = parser.parse_args()
    if arguments.ranks:
        by_ranks(arguments)
    else:
        head = ["network", "method", "bytes", "ratio", "published"]
        made = ((name, make()) for name, make in MODELS.items())
        print(report.table(head, [row(name, *each, model) for name, model in made for each in METHODS.items()]))


if __name__ == "__main__":
    main()
