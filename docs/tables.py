"""Fills the generated tables of README and docs: `python -m docs.tables`, after data or methods have changed.

A page has <!-- table: NAME --> where a table begins and <!-- end --> where it ends. Figures come from docs/data/*.csv
and from the byte formulas of the registered compressors, words from each class's card.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from pathlib import Path

import torch

import lightning_gradcomp as lgc
from benchmarks import language_models, memory, report, results, step_time, summaries, time_to_accuracy, wire
from benchmarks.methods import network
from lightning_gradcomp.app.compose import shipped
from lightning_gradcomp.app.models import resnet18
from lightning_gradcomp.app.train import first_sentence
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.ranks import dense_traffic

DOCS = Path(__file__).parent
PAGES = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
BLOCK = re.compile(r"(<!-- table: (\w+)(?: ([\w.]+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def of_csv(name: str) -> str:
    """docs/data/<name>.csv as it is."""
    with (DOCS / "data" / f"{name}.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    return report.table(head, rows)


def page_of(name: str) -> str:
    """Where the compressor `name` is described: a page and a heading."""
    headings = {
        "dgc": "dgc.md",
        "gradient_dropping": "other_compressors.md#gradient-dropping",
        "powersgd": "other_compressors.md#powersgd",
        "onebit": "other_compressors.md#1-bit-sgd",
        "terngrad": "other_compressors.md#terngrad",
        "twobit": "other_compressors.md#2-bit",
        "eden": "other_compressors.md#eden",
        "int8": "other_compressors.md#8-bits",
    }
    return headings.get(name, "other_compressors.md#16-bits-and-dense")


def ratio(compressor: lgc.Compressor, model: torch.nn.Module) -> float:
    """Traffic of a dense step of two ranks over that of a step after the warm-up."""
    gradients = Gradients(model, compressor).largest
    return dense_traffic(gradients.nbytes, 2) / wire.sent(compressor, gradients, 2, "all_gather")


def times(ratio: float) -> str:
    """A ratio as it stands in a table."""
    return f"{ratio:,.0f}x"


def methods() -> str:
    """How many times fewer bytes each method sends for ResNet-18, when to choose it, and what it sends."""
    model, rows = resnet18(channels=1, classes=10, size=8), []
    for fewer, entry in sorted(((ratio(each.cls(), model), each) for each in lgc.entries()), key=lambda pair: -pair[0]):
        name, card = f"[`{entry.name}`]({page_of(entry.name)})", entry.cls.card
        if entry.strategy != entry.name:
            name += f" (strategy `{entry.strategy}`)"
        rows.append([name, times(fewer), card.pick, card.sends])
    return report.table(["name", "fewer bytes", "choose it for", "sends"], rows)


def by_link() -> str:
    """README's copy of the first table of docs/choosing.md."""
    table = (DOCS / "choosing.md").read_text().split("## By link\n\n")[1].split("\n\n")[0]
    return table.replace("](#", "](choosing.md#").replace("](", "](docs/")


FOR_ADAMW = {
    "int8": (lgc.Int8(), 1),
    "eden": (lgc.EDEN(), 1),
    "eden bits=2": (lgc.EDEN(bits=2), 1),
    "dgc dense_values=int8": (lgc.DGC(sparsity=0.97, dense_values="int8"), 1),
    "sparseloco K=8 D=0": (lgc.SPARSELOCO["compressor"], 8),
    "sparseloco K=30 D=0": (lgc.SPARSELOCO["compressor"], 30),
}
"""Label in text.csv -> the compressor and the steps between two exchanges."""


def adamw() -> str:
    """What a step of GPT-2 small takes to send over 100 Mbit/s, and what each method costs the small GPT."""
    with torch.device("meta"):
        model = network("gpt_small")
    dense = 4 * sum(parameter.numel() for parameter in model.parameters())
    rows = []
    for label, (compressor, steps) in FOR_ADAMW.items():
        fewer = ratio(compressor, model) * steps
        losses = [language_models.difference(label, ranks) for ranks in (2, 8)]
        seconds = f"{dense / fewer / (100e6 / 8):.2g} s"
        rows.append([summaries.code(label), times(fewer), seconds, *losses])
    return report.table(["method", "fewer bytes", "sending takes", "loss, 2 ranks", "loss, 8 ranks"], rows)


RESULT = re.compile(r"^# Result: (.*(?:\n#   .*)*)", re.MULTILINE)


def recipes() -> str:
    """What each recipe trains, and its result if we have measured one; below, the names of the others."""
    rows, others = [], []
    for path in sorted(shipped("recipes").glob("*.yaml")):
        text = path.read_text()
        result = " ".join(RESULT.findall(text))
        if result[:1].isdigit() and "docs/" in result:
            trains = first_sentence(text).partition(":")[0].removesuffix(", two processes")
            rows.append([f"`{path.stem}`", trains, result.partition(" (")[0]])
        else:
            others.append(f"`{path.stem}`")
    return f"{report.table(['recipe', 'trains', 'result'], rows)}\n\nWithout a result of ours: {', '.join(others)}."


TABLES: dict[str, Callable[..., str]] = {
    "accuracy": results.accuracy,
    "adamw": adamw,
    "by_link": by_link,
    "csv": of_csv,
    "finetuned": language_models.finetuned,
    "hsdp": step_time.hsdp,
    "language_models": language_models.table,
    "lengths": language_models.lengths,
    "local_steps": results.local_steps,
    "memory": memory.table,
    "methods": methods,
    "recipes": recipes,
    "step_times": step_time.table,
    "time_to_accuracy": time_to_accuracy.table,
}
"""Name -> what makes it; a second word in the mark is its argument."""


def filled(text: str) -> str:
    """A page with its tables as data and code are today."""
    return BLOCK.sub(lambda mark: f"{mark[1]}{TABLES[mark[2]](*filter(None, [mark[3]]))}\n{mark[4]}", text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text()))
