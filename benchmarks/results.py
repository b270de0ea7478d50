"""Records finished runs: accuracies in docs/data/results.csv, one line per run, losses by language_models.py.

    gradcomp -m recipe=digits compressor=none,dgc data.fold=0,1,2,3,4 hydra.sweep.dir=runs/resnet18    # and so on
    python -m benchmarks.results runs && python -m docs.tables && python -m docs.pictures

The CSV keeps the lines of earlier runs, which together take some ten hours. A run replaces an earlier one with the same
data, network, method, ranks, steps, fold, seed and machine. Options of the compressor, warm-up or optimizer that differ
from the recipe's are part of the method: "twobit warmup_epochs=3", "dgc optimizer.lr=0.005".
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from benchmarks import language_models, report, summaries
from benchmarks.summaries import Summary, place, ratio
from lightning_gradcomp.app.summary import human

TITLES = {"resnet18": "ResNet-18, SGD", "resnet50": "ResNet-50, SGD", "swin_mini": "small Swin, AdamW"}
CSV = report.DATA / "results.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A finished run; a line of the CSV."""

    data: str
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

    @property
    def sample(self) -> tuple[int | None, int]:
        return self.fold, self.seed

    @property
    def value(self) -> float:
        return self.percent


class Setting(NamedTuple):
    """What all methods that are compared have in common."""

    model: str
    dirichlet: float | None
    ranks: int
    steps: int
    data: str = "Digits"

    def __str__(self) -> str:
        unequal = "" if self.dirichlet is None else f", Dirichlet {self.dirichlet:g}"
        return f"{TITLES[self.model]}, N={self.ranks}, {self.steps:,} steps{unequal}"


def result(summary: Summary) -> Result:
    """The line of a run."""
    config, cost = summary["config"], summary["communication"]
    model, data = summaries.ends(config)
    return Result(
        data=data,
        model=model,
        method=summaries.method(config),
        ranks=cost["world_size"],
        fold=config["data"].get("fold"),
        dirichlet=config["data"].get("dirichlet"),
        seed=config["seed"],
        correct=summary["val_correct"],
        images=summary["val_images"],
        bytes_sent=cost["bytes_sent"],
        dense_bytes=cost["dense_bytes"],
        last_ratio=cost["last_step"]["ratio"],
        steps=cost["steps"],
        machine=summaries.machine(summary),
    )


def read_csv() -> list[Result]:
    """The lines of all runs so far."""
    return report.read(CSV, Result)


Settings = dict[Setting, dict[str, list[Result]]]
"""Setting -> method -> runs."""


def by_setting(results: Iterable[Result]) -> Settings:
    """Runs by setting and method."""
    found: Settings = defaultdict(lambda: defaultdict(list))
    for each in results:
        found[Setting(each.model, each.dirichlet, each.ranks, each.steps, each.data)][each.method].append(each)
    return found


def cross_validated(results: Iterable[Result]) -> Settings:
    """The runs of all folds."""
    return by_setting(each for each in results if each.fold is not None)


def paired(results: Sequence[Result], dense: Sequence[Result]) -> str:
    """Difference to dense: mean ± half its 95 % confidence interval (number of pairs); a dash for fewer than two."""
    found = report.differences(results, dense)
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
        for setting in sorted(found, key=_order)
        for method, runs in sorted(found[setting].items(), key=lambda item: place(item[0]))
    ]
    return report.table(["network", "method", "accuracy, %", "difference to dense", "bytes sent", "ratio, run"], rows)


def _order(setting: Setting) -> tuple[int, bool, int, int]:
    return [*TITLES].index(setting.model), setting.dirichlet is not None, setting.ranks, -setting.steps


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
    "resnet18": ("eden", "eden bits=2", "dgc", "powersgd"),
    "resnet50": ("dgc", "powersgd"),
    "swin_mini": ("eden", "eden bits=2", "dgc dense_values=int8", "powersgd", "sparseloco K=8 D=0"),
}
"""Network -> the methods in the table. The picture shows all methods."""


ROUNDS = {
    "`dga`, K = 8, 8 steps late": "dga K=8 D=8",
    "`sparseloco`, K = 8, no delay": "sparseloco K=8 D=0",
    "`sparseloco`, K = 15, no delay (its default)": "sparseloco K=15 D=0",
    "`sparseloco`, K = 8, 8 steps late": "sparseloco K=8 D=8",
}
"""The rows of the table in docs/local_steps.md, and their methods."""

HEAD = ("method", "2 ranks", "8 ranks", "fewer bytes", "network, optimizer", "dense, %")


def accuracy() -> str:
    """The table of the digits: a row per network and method, compared with dense runs on each number of ranks."""
    found, rows = cross_validated(read_csv()), []
    for model, methods in SHOWN.items():
        settings = [setting for setting in SETTINGS if setting.model == model]
        for method in methods:
            compared = [summaries.compared(found[each].get(method, []), found[each]["none"], 1) for each in settings]
            words = [summaries.code(method)]
            words += [each.difference for each in compared]
            words += [summaries.joined(each.fewer for each in compared), TITLES[model]]
            rows.append([*words, summaries.joined(each.dense for each in compared)])
    return report.table(HEAD, rows)


def local_steps() -> str:
    """The table of docs/local_steps.md: differences to dense with local steps, one column per setting."""
    found = cross_validated(read_csv())
    settings = [setting for setting in SETTINGS if setting.model != "resnet50"]
    rows = []
    for name, method in ROUNDS.items():
        each = [report.differences(found[setting][method], found[setting]["none"]) for setting in settings]
        rows.append([name, *(report.interval(differences, 1) for differences in each)])
    return report.table(["method", *(f"{TITLES[each.model]}, {each.ranks} ranks" for each in settings)], rows)


def fashion() -> str:
    """The table of Fashion-MNIST: one row per setting and method, all methods, and the number of pairs."""
    found, rows = by_setting(each for each in read_csv() if each.data == "FashionMNIST"), []
    for setting in sorted(found, key=_order):
        for method, runs in sorted(found[setting].items(), key=lambda item: place(item[0])):
            if method != "none":
                name = summaries.code(method)
                cells = summaries.compared(runs, found[setting]["none"], 2)
                rows.append([name, cells.difference, cells.fewer, TITLES[setting.model], cells.seeds])
    return report.table(["method", "points", "fewer bytes", "network, optimizer", "seeds"], rows)


def _identity(each: Result) -> tuple[str, str, str, int, int, float, int, int, str]:
    """The identity of a run: a run replaces the line with the same one."""
    fold, own = -1 if each.fold is None else each.fold, each.dirichlet or 0
    return each.data, each.model, each.method, each.ranks, each.steps, own, fold, each.seed, each.machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", help="folders, searched recursively for runs")
    arguments = parser.parse_args()
    found = [each for folder in arguments.runs for each in summaries.found(folder)]
    if texts := [(folder, summary) for folder, summary in found if "val_loss" in summary]:
        language_models.record(texts)
    if accuracies := [result(summary) for _, summary in found if "val_correct" in summary]:
        report.record(CSV, accuracies, _identity)
    print(folds(read_csv()), fashion(), language_models.table(), sep="\n\n")


if __name__ == "__main__":
    main()
