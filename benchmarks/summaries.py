"""Finished runs of `gradcomp`, as benchmarks/results.py and benchmarks/language_models.py read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, Protocol

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import lightning_gradcomp as lgc
from benchmarks import report
from lightning_gradcomp.app.compose import register, shipped
from lightning_gradcomp.app.summary import short

Summary = dict[str, Any]
"""The content of a summary.json."""

ORDER = (
    "none",
    "fp16",
    "bf16",
    "int8",
    "eden",
    "dgc",
    "gradient_dropping",
    "powersgd",
    "onebit",
    "terngrad",
    "twobit",
    "dga",
)
ORDER += ("sparseloco", "muloco")
RECIPES = {
    ("resnet18", "Digits"): "digits",
    ("resnet50", "Digits"): "digits_resnet50",
    ("swin_mini", "Digits"): "digits_swin",
    ("resnet18", "FashionMNIST"): "resnet18_fashion_mnist",
    ("swin_mini", "FashionMNIST"): "swin_fashion_mnist",
    ("gpt_mini", "Text"): "stdlib_gpt",
}
"""Network and data -> the recipe."""
MUON = {"stdlib_gpt": "stdlib_gpt_muon"}
"""Recipe -> the one with Muon and an exchange at every step, if it has another learning rate."""
LABELLED = ("compressor", "optimizer")
"""Groups of the config whose options a method's label includes if they differ from the recipe's."""


class Run(report.Outcome, Protocol):
    """A run that is compared with a dense one, and its bytes."""

    @property
    def bytes_sent(self) -> int: ...
    @property
    def dense_bytes(self) -> int: ...


def found(folder: Path) -> Iterator[tuple[Path, Summary]]:
    """The folder and the summary of each finished run below `folder`."""
    for path in sorted(folder.rglob("summary.json")):
        yield path.parent, json.loads(path.read_text())


def ends(config: Summary) -> tuple[str, str]:
    """The names of the network and of the data's class."""
    return short(config["model"]["_target_"]), short(config["data"]["_target_"])


def method(config: Summary) -> str:
    """The label of a method: its name, its rounds, and the options that differ from the recipe's with this method.

    Rounds are separate methods: "dga K=8 D=8", "dga:onebit K=8 D=8", "sparseloco K=15 D=0", "muloco K=30 D=0".
    """
    compressor, strategy = compressor_of(config), config["strategy"]
    rounds = short(strategy["_target_"]) == "DelayedStrategy"
    name, words = RECIPES[ends(config)], list[str]()
    if optimizer(config) == "Muon":
        words.append("optimizer=muon")  # its other options are labelled
        name = name if rounds else MUON.get(name, name)
    label = compressor
    if rounds:
        kind = "dga" if compressor == "none" else f"dga:{compressor}"
        if strategy["error_decay"] is not None:
            kind = compressor = "muloco" if strategy["outer"] else "sparseloco"  # choices of both groups
        label = f"{kind} K={strategy['period']} D={strategy['delay']}"
    return " ".join([label, *differing(config, usual(name, compressor, *words))])


def optimizer(config: Summary) -> str:
    """The name of the optimizer: "SGD", "AdamW" or "Muon"."""
    return short(config["optimizer"]["_target_"]).replace("MuonAdamW", "Muon")


def compressor_of(config: Summary) -> str:
    """The name of the compressor, such as "dgc"."""
    [name] = [entry.name for entry in lgc.entries() if entry.cls.__name__ == short(config["compressor"]["_target_"])]
    return name


@cache
def usual(recipe: str, compressor: str, *words: str) -> Summary:
    """The config of a recipe with this compressor and its defaults, as it appears in a run's summary."""
    return composed(f"recipe={recipe}", f"compressor={compressor}", *words)


def composed(*words: str) -> Summary:
    """The config of a run, as it appears in its summary."""
    register()
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        config: Any = OmegaConf.to_container(compose("train", list(words)))
        return config


def differing(config: Summary, recipe: Summary) -> Iterator[str]:
    """The options of a run that differ from the recipe's, as on a command line but without `compressor.`."""
    for group in LABELLED:
        for option, value in config[group].items():
            if value != recipe[group].get(option, value):
                yield f"{option}={value}" if group == "compressor" else f"{group}.{option}={value}"
    for option, value in config["callbacks"].get("sparsity_warmup", {}).items():
        if option != "_target_":
            yield f"sparsity_warmup.{option}={value}"


def place(method: str) -> tuple[int, int, str]:
    """Sort key of a method in a table."""
    return ORDER.index(method.partition(" ")[0].partition(":")[0]), len(method), method


def code(method: str) -> str:
    """A method as it stands in a table: `sparseloco` K=30 D=0, or `dgc` dense_values=int8."""
    name, _, options = method.partition(" ")
    return f"`{name}` {options}".strip()


class Compared(NamedTuple):
    """Cells of a table, empty without runs: difference to dense, times fewer bytes, dense result, number of pairs."""

    difference: str
    fewer: str
    dense: str
    seeds: str


def compared(runs: Sequence[Run], dense: Iterable[Run], digits: int) -> Compared:
    """Runs beside the dense ones that they are paired with; a dash if there is none."""
    if not runs:
        return Compared("", "", "", "")
    both, fewer = report.pairs(runs, dense), f"{ratio(runs)}x"
    if not both:
        return Compared("—", fewer, "—", str(len(runs)))
    interval = report.interval([own - other for own, other in both], digits)
    return Compared(interval, fewer, f"{mean(other for _, other in both):.{digits}f}", str(len(both)))


def joined(cells: Iterable[str]) -> str:
    """Those of each number of ranks as one cell; equal ones once."""
    return ", ".join(dict.fromkeys(filter(None, cells)))


def machine(summary: Summary) -> str:
    """The hardware and torch's version, which together determine the arithmetic."""
    name = summary["device"]
    if name == "CPU":
        name = f"{summary['cpu_cores']} cores of {summary['processor']}"
    return f"{name}, torch {summary['packages']['torch']}"


def ratio(runs: Iterable[Run]) -> str:
    """Dense bytes of a run divided by bytes sent, with three digits, or all those before the decimal point."""
    mean_ratio = mean(each.dense_bytes / each.bytes_sent for each in runs)
    return f"{mean_ratio:.3g}" if mean_ratio < 1000 else f"{mean_ratio:,.0f}"
