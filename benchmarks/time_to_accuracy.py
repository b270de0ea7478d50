"""Seconds and bytes of the digits recipe over a link of a given rate, by method: for whole runs and to an accuracy.

    python -m benchmarks.time_to_accuracy --rate-mbit 1000 --methods none,fp16_hook,powersgd_hook,dgc --seeds 0,1,2
    python -m benchmarks.time_to_accuracy --rate-mbit 1000 --methods no_exchange,ddp,dgc:strategy.topology=auto --record

Methods are values of `gradcomp compressor=...`, with further overrides after a colon
(`dgc:compressor.values=bf16;trainer.max_epochs=8`), and torch's own hooks in Lightning's DDPStrategy. A run is the
whole recipe, half a minute to 15 minutes, on nodes started by benchmarks.link. The clock is rank 0's; it starts with
`fit` and includes validation. Bytes are those that the kernel counts on all nodes, including headers. Methods take
turns, seed by seed. If the machine has a GPU, the nodes share it and exchange over gloo. `--record` adds each run to a
CSV, docs/data/time_to_accuracy.csv by default.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import hydra
import lightning as L
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import OmegaConf
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import report
from benchmarks.link import emulated, result
from benchmarks.methods import TITLES, with_hook
from benchmarks.step_time import link
from lightning_gradcomp.app import compose
from lightning_gradcomp.app.fit import hide_messages
from lightning_gradcomp.app.summary import human
from lightning_gradcomp.plugin import CommunicationMonitor

HOOKS = ("ddp", "fp16_hook", "powersgd_hook", "no_exchange")
DENSE_STEPS = 22
"""Dense steps before torch's PowerSGD hook starts: the default of lgc.PowerSGD."""

Curve = list[tuple[float, float]]
"""(seconds, validation accuracy) after each epoch."""

CSV = report.DATA / "time_to_accuracy.csv"
COMPUTATION = "no_exchange"


@dataclass(frozen=True, kw_only=True)
class WholeRun:
    """A line of the CSV."""

    rate_mbit: int  # 0: loopback
    method: str
    seed: int
    seconds: float  # of training, including validation
    accuracy: float  # at the end, in %
    bytes_sent: int  # by all nodes, including headers; 0: not counted, over loopback
    machine: str
    reached: float | None = None  # seconds to --accuracy; None: never, or not recorded


def read_csv() -> list[WholeRun]:
    """All lines."""
    return report.read(CSV, WholeRun)


def record(new: Sequence[WholeRun], path: Path) -> None:
    """Add lines, replacing earlier ones with the same link, method and seed."""
    report.record(path, new, lambda each: (each.rate_mbit, each.method, each.seed))


def seconds(runs: Iterable[WholeRun], method: str, rate_mbit: int) -> float | None:
    """Seconds of a run, the median over seeds; None if there is no run."""
    found = [each.seconds for each in runs if (each.method, each.rate_mbit) == (method, rate_mbit)]
    return median(found) if found else None


def accuracy(runs: Iterable[WholeRun], method: str) -> float:
    """Final accuracy in % over 1 Gbit/s, where `topology="auto"` compresses; the mean over seeds."""
    return mean(each.accuracy for each in runs if (each.method, each.rate_mbit) == (method, 1000))


def table() -> str:
    """The page's table: seconds by link and method, fastest over 1 Gbit/s first, and what a rank sent there."""
    runs = read_csv()
    rates, methods = sorted({each.rate_mbit for each in runs}), {each.method for each in runs}
    rows = []
    for method in (method for method in TITLES if method in methods):
        times = ["—" if (each := seconds(runs, method, rate)) is None else f"{each:,.0f} s" for rate in rates]
        sent = median(each.bytes_sent / 2 for each in runs if (each.method, each.rate_mbit) == (method, 1000))
        alone = method == COMPUTATION  # its ranks drift apart
        last = ["", ""] if alone else [f"{accuracy(runs, method):.1f} %", human(sent)]
        rows.append([TITLES[method], *times, *last])
    head = ["method", *map(link, rates), "accuracy at the end", "sent by a rank over 1 Gbit/s"]
    return report.table(head, rows)


class HookStrategy(DDPStrategy):
    """Lightning's DDPStrategy with one of torch's hooks, which Lightning would register only on a GPU."""

    def __init__(self, method: str, **_: Any) -> None:  # others: the compressor of the config
        super().__init__()
        self._method = method

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return with_hook(self._method, model, DENSE_STEPS)


class Clock(L.Callback):
    """Records when each validation ended, and its accuracy."""

    def __init__(self) -> None:
        self.curve: Curve = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.begin = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.curve.append((time.perf_counter() - self.begin, trainer.callback_metrics["val_acc"].item()))


def train(path: Path, place: Path) -> None:
    """One rank of the run described by a config; rank 0 writes the curve."""
    hide_messages()
    compose.register()
    config: Any = OmegaConf.load(path)
    run, clock = compose.build(config), Clock()
    trainer: Any = run.trainer
    if "method" in config.strategy:  # CommunicationMonitor is for the strategies of lightning_gradcomp
        trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, CommunicationMonitor)]
    trainer.callbacks.append(clock)
    trainer.strategy._process_group_backend = "gloo"  # the nodes share this machine's GPU, which NCCL refuses
    trainer.fit(run.task, run.data)
    if trainer.is_global_zero:
        place.write_text(json.dumps(clock.curve))


def curve(method: str, seed: int, launcher: list[str]) -> tuple[Curve, int]:
    """Run a recipe over the link. Returns its curve and the bytes sent by all nodes, 0 over loopback."""
    name, _, more = method.partition(":")
    overrides = [f"compressor={'none' if name in HOOKS else name}", f"seed={seed}", "trainer.enable_progress_bar=false"]
    compose.register()
    with hydra.initialize_config_dir(str(compose.shipped("conf")), version_base="1.3"):
        config = hydra.compose("train", [*overrides, *(word for word in more.split(";") if word)])
    if name in HOOKS:
        config.strategy = {"_target_": "benchmarks.time_to_accuracy.HookStrategy", "method": name}
    with tempfile.TemporaryDirectory() as folder:
        config.folder, path = folder, Path(folder, "config.yaml")
        OmegaConf.save(config, path)
        points, printed = result(launcher, "benchmarks.time_to_accuracy", "--train", str(path))
    sent = re.findall(r"node \d+ sent ([\d,]+) bytes", printed)
    return [tuple(point) for point in points], sum(int(num_bytes.replace(",", "")) for num_bytes in sent)


def whole_run(
    method: str, seed: int, rate_mbit: float, points: Curve, sent: int, accuracy: float | None = None
) -> WholeRun:
    """The line of a run; options of the method are not part of its name."""
    took, reached = points[-1]
    return WholeRun(
        rate_mbit=round(rate_mbit),
        method=method.partition(":")[0],
        seed=seed,
        seconds=round(took, 1),
        accuracy=round(100 * reached, 2),
        bytes_sent=sent,
        machine=report.machine(),
        reached=None if accuracy is None or math.isinf(first := until(points, accuracy)) else round(first, 1),
    )


def until(points: Curve, accuracy: float) -> float:
    """Seconds to `accuracy`; infinite if it was never reached."""
    return next((seconds for seconds, now in points if now >= accuracy), float("inf"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="none,dgc")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--accuracy", type=float, default=0.98)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rate-mbit", type=float, default=1000, help="0: loopback")
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--record", action="store_true", help="add to the CSV")
    parser.add_argument("--csv", type=Path, default=CSV)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train, arguments.place)
        return
    launcher = emulated(arguments.nodes, 1, arguments.rate_mbit, arguments.delay_ms)
    runs: dict[str, list[tuple[Curve, int]]] = {method: [] for method in arguments.methods.split(",")}
    for seed in map(int, arguments.seeds.split(",")):
        for method, found in runs.items():
            found.append(curve(method, seed, launcher))
            print(f"{method}, seed {seed}: {found[-1][1]:,} bytes, {found[-1][0]}", flush=True)
            if arguments.rate_mbit and not found[-1][1]:
                sys.exit("these figures are of loopback: this machine can't emulate a link")
            if arguments.record:
                run = whole_run(method, seed, arguments.rate_mbit, *found[-1], arguments.accuracy)
                record([run], arguments.csv)
    rows = []
    for method, found in runs.items():
        times = [[until(points, arguments.accuracy) for points, _ in found], [points[-1][0] for points, _ in found]]
        words = [f"{median(each):.0f} ({', '.join(f'{one:.0f}' for one in each)})" for each in times]
        rows.append([method, *words, f"{median(sent for _, sent in found) / 1e6:,.1f}"])
    print(f"\n{report.machine()}, N={arguments.nodes}, {arguments.rate_mbit:g} Mbit/s, {arguments.delay_ms:g} ms")
    head = ["method", f"seconds to {arguments.accuracy:.0%} (each seed)", "whole run", "MB sent by all nodes"]
    print(report.table(head, rows))


if __name__ == "__main__":
    main()
