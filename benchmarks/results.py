"""docs/data/results.csv, one line per accuracy run, and the table of five-fold cross-validations in docs/results.md.

    gradcomp -m recipe=digits compressor=none,dgc data.fold=0,1,2,3,4 hydra.sweep.dir=runs/resnet18    # and so on
    python -m benchmarks.results runs && python -m docs.tables && python -m docs.pictures

The CSV keeps the lines of earlier runs, which together take some ten hours. A run replaces an earlier one with the same
network, method, data, ranks, steps, fold, seed and machine. Options of the compressor, warm-up or optimizer that differ
from the recipe's are part of the method: "twobit warmup_epochs=3", "dgc optimizer.lr=0.005".
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import lightning_gradcomp as lgc
from benchmarks import report
from lightning_gradcomp.app.compose import register, shipped
from lightning_gradcomp.app.sizes import human
from lightning_gradcomp.app.summary import short

Key = tuple[str, str]
"""Network and method."""

Pair = tuple[float, float]
"""Accuracy of a run and of the dense run that it is compared with, in %."""

ORDER = ("none", "fp16", "bf16", "dgc", "gradient_dropping", "powersgd", "onebit", "terngrad", "twobit", "dga")
ORDER += ("sparseloco",)
TITLES = {"resnet18": "ResNet-18, SGD", "resnet50": "ResNet-50, SGD", "swin_mini": "small Swin, AdamW"}
RECIPES = {"resnet18": "digits", "resnet50": "digits_resnet50", "swin_mini": "digits_swin"}
"""Network -> its recipe. SparseLoCo's compressor has the options of recipe=digits_sparseloco with all of them."""
LABELLED = ("compressor", "optimizer")
"""Groups of the config whose options a method's label includes if they differ from the recipe's."""
CSV = report.DATA / "results.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A finished run; a line of the CSV."""

    model: str
    method: str
    ranks: int
    fold: int | None  # of a cross-validation; None: the fixed split
    seed: int
    correct: int
    images: int
    bytes_sent: int
    dense_bytes: int
    last_ratio: float  # dense bytes divided by bytes sent, in the last step
    steps: int
    machine: str
    dirichlet: float | None = None  # concentration, if each rank had its own images

    @property
    def percent(self) -> float:
        """Validation accuracy."""
        return 100 * self.correct / self.images


class Setting(NamedTuple):
    """What all methods of a cross-validation have in common."""

    model: str
    dirichlet: float | None
    ranks: int
    steps: int

    def __str__(self) -> str:
        unequal = "" if self.dirichlet is None else f", Dirichlet {self.dirichlet:g}"
        return f"{TITLES[self.model]}, N={self.ranks}, {self.steps:,} steps{unequal}"


def summaries(folder: Path) -> list[dict[str, Any]]:
    """The summaries of all finished runs below `folder`."""
    return [json.loads(path.read_text()) for path in sorted(folder.rglob("summary.json"))]


def key(summary: dict[str, Any]) -> Key:
    """Key of a run. Rounds are separate methods: "dga K=8 D=8", "dga:onebit K=8 D=8", "sparseloco K=15 D=0"."""
    config = summary["config"]
    model, compressor, strategy = short(config["model"]["_target_"]), compressor_of(config), config["strategy"]
    recipe = usual(RECIPES[model], compressor)
    method = compressor
    if short(strategy["_target_"]) == "DelayedStrategy":
        kind = "dga" if compressor == "none" else f"dga:{compressor}"
        if strategy["error_decay"] is not None:
            kind = "sparseloco"
            recipe = recipe | {"compressor": usual("digits_sparseloco", compressor)["compressor"]}
        method = f"{kind} K={strategy['period']} D={strategy['delay']}"
    return model, " ".join([method, *differing(config, recipe)])


def compressor_of(config: dict[str, Any]) -> str:
    """The name of the compressor, such as "dgc"."""
    [name] = [entry.name for entry in lgc.entries() if entry.cls.__name__ == short(config["compressor"]["_target_"])]
    return name


@cache
def usual(recipe: str, compressor: str) -> dict[str, Any]:
    """The config of a recipe as it appears in a run's summary; with this compressor, unless the recipe has it."""
    config = composed(f"recipe={recipe}")
    return config if compressor_of(config) == compressor else composed(f"recipe={recipe}", f"compressor={compressor}")


def composed(*words: str) -> dict[str, Any]:
    """The config of a run, as it appears in its summary."""
    register()
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        found: Any = OmegaConf.to_container(compose("train", list(words)))
        return found


def differing(config: dict[str, Any], recipe: dict[str, Any]) -> Iterator[str]:
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


def result(summary: dict[str, Any]) -> Result:
    """The line of a run."""
    model, method = key(summary)
    cost, machine = summary["communication"], summary["device"]
    if machine == "CPU":
        machine = f"{summary['cpu_cores']} cores of {summary['processor']}"
    return Result(
        model=model,
        method=method,
        ranks=cost["world_size"],
        fold=summary["config"]["data"].get("fold"),
        dirichlet=summary["config"]["data"].get("dirichlet"),
        seed=summary["config"]["seed"],
        correct=summary["val_correct"],
        images=summary["val_images"],
        bytes_sent=cost["bytes_sent"],
        dense_bytes=cost["dense_bytes"],
        last_ratio=cost["last_step"]["ratio"],
        steps=cost["steps"],
        machine=f"{machine}, torch {summary['packages']['torch']}",
    )


def read_csv() -> list[Result]:
    """The lines of all runs so far."""
    return report.read(CSV, Result)


def grouped(results: Iterable[Result]) -> dict[Key, list[Result]]:
    """Network and method -> the runs of all seeds on two ranks, with the fixed split."""
    found: dict[Key, list[Result]] = defaultdict(list)
    for each in results:
        if each.fold is None and each.ranks == 2 and each.dirichlet is None:
            found[each.model, each.method].append(each)
    return found


def cross_validated(results: Iterable[Result]) -> dict[Setting, dict[str, list[Result]]]:
    """Setting -> method -> the runs of all folds."""
    found: dict[Setting, dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for each in results:
        if each.fold is not None:
            found[Setting(each.model, each.dirichlet, each.ranks, each.steps)][each.method].append(each)
    return found


def pairs(results: Sequence[Result], dense: Sequence[Result]) -> list[Pair]:
    """Pair runs with the dense ones of the same fold and seed, and of the same machine if there is one.

    A fold run on several machines makes one pair, of the means, because its images are the same on all of them.
    """
    beside: dict[tuple[int | None, int], list[Result]] = defaultdict(list)
    for each in dense:
        beside[each.fold, each.seed].append(each)
    found: dict[tuple[int | None, int], list[Pair]] = defaultdict(list)
    for each in results:
        if others := beside.get((each.fold, each.seed)):
            nearest = [other for other in others if other.machine == each.machine] or others
            found[each.fold, each.seed].append((each.percent, mean(other.percent for other in nearest)))
    return [(mean(own for own, _ in each), mean(other for _, other in each)) for each in found.values()]


def differences(results: Sequence[Result], dense: Sequence[Result]) -> list[float]:
    """The difference to dense of each of `pairs`, in percentage points."""
    return [own - other for own, other in pairs(results, dense)]


def paired(results: Sequence[Result], dense: Sequence[Result]) -> str:
    """Difference to dense: mean ± half its 95 % confidence interval (number of pairs); a dash for fewer than two."""
    found = differences(results, dense)
    return f"{report.interval(found)} ({len(found)})" if len(found) > 1 else "—"


def folds(results: Sequence[Result]) -> str:
    """A table of every cross-validation with every method, for the screen."""
    found = cross_validated(results)
    rows = [
        [
            str(setting),
            f"`{method}`",
            f"{report.spread([each.percent for each in runs], 2)} ({len(runs)})",
            "" if method == "none" else paired(runs, found[setting].get("none", [])),
            human(mean(each.bytes_sent for each in runs)),
            ratio(runs),
        ]
        for setting in sorted(found, key=_row)
        for method, runs in sorted(found[setting].items(), key=lambda item: place(item[0]))
    ]
    return report.table(["network", "method", "accuracy, %", "difference to dense", "bytes sent", "ratio, run"], rows)


def _row(setting: Setting) -> tuple[int, bool, int, int]:
    return [*TITLES].index(setting.model), setting.dirichlet is not None, setting.ranks, -setting.steps


def ratio(results: Sequence[Result]) -> str:
    """Dense bytes of a run divided by bytes sent, with three digits, or all those before the decimal point."""
    mean_ratio = mean(each.dense_bytes / each.bytes_sent for each in results)
    return f"{mean_ratio:.3g}" if mean_ratio < 1000 else f"{mean_ratio:,.0f}"


SETTINGS = (
    Setting("resnet18", None, 2, 220),
    Setting("resnet18", None, 8, 220),
    Setting("resnet50", None, 2, 220),
    Setting("resnet50", None, 8, 220),
    Setting("swin_mini", None, 2, 1320),
    Setting("swin_mini", None, 8, 660),
)
"""The cross-validations in docs/results.md."""

SHOWN = {
    "resnet18": ("dgc", "powersgd"),
    "resnet50": ("dgc", "powersgd"),
    "swin_mini": ("dgc", "powersgd", "sparseloco K=8 D=0"),
}
"""Network -> the methods in the table. The picture shows all methods."""


def accuracy() -> str:
    """The table: one row per setting and method, with the dense runs that it is paired with."""
    found, rows = cross_validated(read_csv()), []
    for setting in SETTINGS:
        for method in SHOWN[setting.model]:
            if runs := found[setting].get(method):
                both = pairs(runs, found[setting]["none"])
                own, dense = zip(*both, strict=True)
                interval = report.interval([one - other for one, other in both], 1)
                words = [TITLES[setting.model], setting.ranks, f"`{method.partition(' ')[0]}`"]
                rows.append([*words, report.spread(dense), report.spread(own), interval, f"{ratio(runs)}x"])
    head = ["network, optimizer", "ranks", "method", "dense, %", "method, %", "difference, points", "fewer bytes"]
    return report.table(head, rows)


def _identity(each: Result) -> tuple[str, str, int, int, float, int, int, str]:
    """The identity of a run: a run replaces the line with the same one."""
    fold = -1 if each.fold is None else each.fold
    return each.model, each.method, each.ranks, each.steps, each.dirichlet or 0, fold, each.seed, each.machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", help="folders, searched recursively for runs")
    new = [result(summary) for folder in parser.parse_args().runs for summary in summaries(folder)]
    print(folds(report.record(CSV, new, _identity) if new else read_csv()))


if __name__ == "__main__":
    main()
