"""Writes the table of methods into docs/compressors.md: `python docs/tables.py`, after a compressor has changed.

Nothing in it is typed in by hand: words come from each class's card, figures from what a step would exchange for the
recipes' ResNets on two ranks, with default options after the warm-up. The tests count those bytes at the collectives.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from lightning_gradcomp import Compressor, Lossy, entries
from lightning_gradcomp.app.models import build
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.traffic import traffic
from lightning_gradcomp.averaging.workers import Ranks, dense_traffic

PAGE = Path(__file__).with_name("compressors.md")
MARKED = re.compile(r"(<!-- methods -->\n).*?(\n<!-- end -->)", re.DOTALL)
COLLECTIVES = {"gather": "all-gather", "mean": "all-reduce", "maximum": "all-reduce (MAX)"}
MODELS = {"ResNet-18": "resnet18", "ResNet-50": "resnet50"}
HEAD = ["name", "sends", "bits an element", *(f"{name}, N=2" for name in MODELS), "collectives a step"]
HEAD += ["remembers", "optimizers", "pick it when", "from"]


def page_of(name: str) -> str:
    """The page of docs/methods on which the compressor `name` is described."""
    return "dense" if name in ("none", "fp16", "bf16") else name


def step(compressor: Compressor, model: torch.nn.Module) -> tuple[float, float, list[str]]:
    """Bits an element of what is compressed, dense traffic over traffic, and the collectives, of one step at N=2."""
    gradients = Gradients(model, compressor)
    dense = dense_traffic(gradients.nbytes, 2)
    if not isinstance(compressor, Lossy):
        return (
            8.0 * compressor.wire_dtype.itemsize,
            4 / compressor.wire_dtype.itemsize,
            ["all-reduce, in DDP's buckets"],
        )
    final = compressor.at(compressor.final_sparsity)
    messages = final.messages(gradients.layout)
    bits = 8 * sum(size for _, size in messages) / gradients.layout.n
    ratio = dense / traffic(final, gradients, Ranks(None, 2), "all_gather")
    return bits, ratio, [COLLECTIVES[how] for how, _ in messages]


def rows() -> list[list[str]]:
    """A row of the table for every compressor that the package registers, the fewest bytes first."""
    models = [build(name, channels=1, classes=10) for name in MODELS.values()]
    found = []
    for entry in entries():
        compressor, card = entry.cls(), entry.cls.card
        (bits, ratio, collectives), *others = (step(compressor, model) for model in models)
        name = f"[`{entry.name}`](methods/{page_of(entry.name)}.md)"
        if entry.strategy != entry.name:
            name += f" (strategy `{entry.strategy}`)"
        ratios = [f"{ratio:.0f}x", *(f"{other:.0f}x" for _, other, _ in others)]
        words = [
            " + ".join(collectives),
            card.remembers,
            "SGD, Adam, AdamW" if entry.cls.needs_optimizer else "any",
            card.pick,
        ]
        found.append((-ratio, [name, card.sends, f"{bits:.3g}", *ratios, *words, card.source]))
    return [row for _, row in sorted(found)]


def page() -> str:
    """docs/compressors.md with the table of now."""
    lines = [HEAD, ["---"] * len(HEAD), *rows()]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return MARKED.sub(lambda marks: f"{marks[1]}{table}{marks[2]}", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
