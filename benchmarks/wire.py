"""Bytes of one compressed step by network and method, beside the entropy bound and what the papers report.

    python -m benchmarks.wire --out results

Nothing is timed: lengths follow from shapes and options alone, and the tests count them at the collectives. The bound
is what an ideal code for a random set of k of n positions would need: log2 C(n, k) bits, with the values and the
uncompressed tensors as they are written. Methods whose codes have a fixed length, and low rank, have no such bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from math import lgamma, log
from pathlib import Path

import torch
import torchvision
from matplotlib.axes import Axes

import lightning_gradcomp as lgc
from benchmarks import report
from lightning_gradcomp.app.models import resnet18
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.ranks import Ranks, dense_traffic
from lightning_gradcomp.averaging.traffic import traffic
from lightning_gradcomp.compressors.kernels.block_gaps import index_bytes
from lightning_gradcomp.compressors.kernels.topk import count, count_each

MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "ResNet-18, 32x32, 10 classes": partial(resnet18, channels=3, classes=10),
    "ResNet-50, 224x224, 1,000 classes": torchvision.models.resnet50,
    "Swin-T, 224x224, 1,000 classes": torchvision.models.swin_t,
}
BF16 = {"values": "bf16", "dense_values": "bf16"}
METHODS: dict[str, lgc.LossyCompressor] = {
    "dgc": lgc.DGC(),
    "dgc, bf16": lgc.DGC(**BF16),
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


def log2_choose(n: int, k: int) -> float:
    """log2 of the number of ways to choose k of n."""
    return (lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)) / log(2)


def kept(compressor: lgc.LossyCompressor, gradients: Gradients) -> int:
    """How many entries a sparse method sends; 0 for the others."""
    density = 1 - (compressor.final_sparsity or 0.0)
    if isinstance(compressor, lgc.DGC):
        return count_each(gradients.layout, density)
    return count(gradients.layout.n, density) if isinstance(compressor, lgc.GradientDropping) else 0


def measure(compressor: lgc.LossyCompressor, model: torch.nn.Module) -> dict[str, float | int | None]:
    """Of one step at N=2: bytes, ratio to dense, index bits an entry and their entropy, the bound of the whole step."""
    gradients = Gradients(model, compressor)
    n, dense = gradients.layout.n, dense_traffic(gradients.nbytes, 2)
    step = traffic(compressor.with_sparsity(compressor.final_sparsity), gradients, Ranks(None, 2), "all_gather")
    index_bits = entropy = bound = None
    if k := kept(compressor, gradients):
        index_bits, entropy = 8 * index_bytes(n, k) / k, log2_choose(n, k) / k
        bound = step - k * (index_bits - entropy) / 8
    return {
        "bytes": step, "ratio": dense / step, "index_bits": index_bits, "index_entropy": entropy, "bound": bound,
    }  # fmt: skip


def draw(results: dict[str, dict[str, dict[str, float]]]) -> Callable[[Axes], None]:
    """Ratios as bars, a colour a network."""

    def on(axes: Axes) -> None:
        width = 0.8 / len(results)
        for position, (model, methods) in enumerate(results.items()):
            heights = [figures["ratio"] for figures in methods.values()]
            axes.bar([x + position * width for x in range(len(heights))], heights, width, label=model)
        axes.set(yscale="log", ylabel="dense bytes / bytes sent, a step, N=2")
        axes.set_xticks([x + width for x in range(len(METHODS))], METHODS, rotation=40, ha="right")
        axes.legend(fontsize="small")

    return on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder for wire.json and wire.png")
    arguments = parser.parse_args()
    results = {name: {} for name in MODELS}
    for name, make in MODELS.items():
        model = make()
        for method, compressor in METHODS.items():
            results[name][method] = measure(compressor, model)
    head = ["network", "method", "bytes", "ratio", "index bits (entropy)", "above the bound", "published"]
    rows = []
    for name, methods in results.items():
        for method, r in methods.items():
            index = f"{r['index_bits']:.2f} ({r['index_entropy']:.2f})" if r["index_bits"] else ""
            above = f"{r['bytes'] / r['bound'] - 1:.1%}" if r["bound"] else ""
            published = PUBLISHED.get((method, name.partition(",")[0]), "")
            rows.append([name, method, f"{r['bytes']:,}", f"{r['ratio']:.0f}x", index, above, published])
    print(report.table(head, rows))
    report.write(arguments.out, "wire", results, {"N": 2}, draw(results))


if __name__ == "__main__":
    main()
