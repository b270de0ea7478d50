"""Fills the generated tables of README and docs: `python -m docs.tables`, after data, methods or options have changed.

A page has <!-- table: NAME --> where a table begins and <!-- end --> where it ends. Figures come from docs/data/*.csv
and from the byte formulas of the registered compressors, words from each class's card and docstring.
"""

from __future__ import annotations

import csv
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import lightning_gradcomp as lgc
from benchmarks import language_models, report, results, step_time, time_to_accuracy
from lightning_gradcomp.app.models import NETWORKS
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.ranks import Ranks, dense_traffic
from lightning_gradcomp.averaging.topology import dense_step_traffic, traffic
from lightning_gradcomp.compressors.few_bits import FORMATS
from lightning_gradcomp.compressors.kernels.formats import value_bytes

DOCS = Path(__file__).parent
PAGES = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]
BLOCK = re.compile(r"(<!-- table: (\w+)(?: (\w+))? -->\n).*?(<!-- end -->)", re.DOTALL)
COLLECTIVES = {"gather": "all-gather", "mean": "all-reduce", "maximum": "all-reduce (MAX)"}
MODELS = {"ResNet-18": "resnet18", "ResNet-50": "resnet50"}


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


def step(compressor: lgc.Compressor, model: torch.nn.Module) -> tuple[float, float, list[str]]:
    """Bits an element of what is compressed, dense traffic over traffic, and the collectives, of one step at N=2."""
    gradients = Gradients(model, compressor)
    dense = dense_traffic(gradients.nbytes, 2)
    if not isinstance(compressor, lgc.LossyCompressor):
        ratio = dense / dense_step_traffic(gradients, Ranks(None, 2), compressor.wire)
        if form := FORMATS.get(compressor.wire):
            return form.nbytes(1024) / 128, ratio, ["all-to-all", "all-gather"]
        return value_bytes(256, compressor.wire) / 32, ratio, ["all-reduce"]
    final = compressor.with_sparsity(compressor.final_sparsity)
    messages = final.messages(gradients.layout)
    bits = 8 * sum(size for _, size in messages) / gradients.layout.n
    ratio = dense / traffic(final, gradients, Ranks(None, 2), "all_gather")
    return bits, ratio, [COLLECTIVES[how] for how, _ in messages]


def by_ratio() -> Iterator[tuple[Any, list[tuple[float, float, list[str]]]]]:
    """Every registered compressor with its step for each of MODELS, the fewest bytes first."""
    models = [NETWORKS[name](channels=1, classes=10, size=8) for name in MODELS.values()]
    found = [(entry, [step(entry.cls(), model) for model in models]) for entry in lgc.entries()]
    yield from sorted(found, key=lambda each: -each[1][0][1])


def methods() -> str:
    """What each compressor sends and takes, and how many times fewer bytes that is."""
    rows = []
    for entry, steps in by_ratio():
        (bits, _, collectives), card = steps[0], entry.cls.card
        name = f"[`{entry.name}`]({page_of(entry.name)})"
        if entry.strategy != entry.name:
            name += f" (strategy `{entry.strategy}`)"
        ratios = [f"{ratio:.0f}x" for _, ratio, _ in steps]
        optimizers = "SGD, Adam, AdamW" if entry.cls.needs_optimizer else "any"
        rows.append([name, card.sends, f"{bits:.2g}", *ratios, " + ".join(collectives), optimizers, card.pick])
    head = ["name", "sends", "bits an element", *MODELS, "collectives", "optimizers", "choose it when"]
    return report.table(head, rows)


def strategies() -> str:
    """README's: name, idea, times fewer bytes."""
    rows = [
        [f"[`{entry.strategy}`](docs/{page_of(entry.name)})", entry.cls.card.sends, f"{steps[0][1]:.0f}x"]
        for entry, steps in by_ratio()
    ]
    return report.table(["strategy", "each step sends", "times fewer bytes"], rows)


ENTRY = re.compile(r"^    (\**\w+): (.*?)(?=^    \**\w+: |\Z)", re.DOTALL | re.MULTILINE)


def arguments(cls: type) -> dict[str, str]:
    """What the docstring of a class, or of the nearest base that has the entry, says under "Args:"."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        text = inspect.cleandoc(vars(each).get("__doc__") or "")
        section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)
        found |= {name: " ".join(words.split()) for name, words in ENTRY.findall(section[1] if section else "")}
    return found


def defaults(cls: type) -> dict[str, Any]:
    """The options of a class and their defaults, without those that all compressors share."""
    if not is_dataclass(cls):
        parameters = inspect.signature(cls).parameters.values()
        return {each.name: each.default for each in parameters if each.kind is not each.VAR_KEYWORD}
    lossy = issubclass(cls, lgc.LossyCompressor) and cls is not lgc.LossyCompressor
    shared = {field.name for field in fields(lgc.LossyCompressor)} if lossy else set()
    return {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(cls)
        if field.name not in shared
    }


def written(default: Any) -> str:
    """A default as it stands in a table: Python, but with double quotes."""
    if default in (MISSING, inspect.Parameter.empty):
        return "required"
    if isinstance(default, timedelta):
        return f"{default.total_seconds() / 60:g} minutes"
    return f'`"{default}"`' if isinstance(default, str) else f"`{default!r}`"


def options(name: str) -> str:
    """Option, default and meaning of a public class."""
    cls = getattr(lgc, name)
    meanings = arguments(cls)
    rows = [[f"`{option}`", written(default), meanings[option]] for option, default in defaults(cls).items()]
    return report.table(["option", "default", "meaning"], rows)


TABLES: dict[str, Callable[..., str]] = {
    "accuracy": results.accuracy,
    "csv": of_csv,
    "fashion": results.fashion,
    "language_models": language_models.table,
    "local_steps": results.local_steps,
    "methods": methods,
    "options": options,
    "step_times": step_time.table,
    "strategies": strategies,
    "time_to_accuracy": time_to_accuracy.table,
}
"""Name -> what makes it; a second word in the mark is its argument."""


def filled(text: str) -> str:
    """A page with its tables as data and code are today."""
    return BLOCK.sub(lambda mark: f"{mark[1]}{TABLES[mark[2]](*filter(None, [mark[3]]))}\n{mark[4]}", text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text()))
