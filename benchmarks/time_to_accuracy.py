"""Seconds and bytes until the digits recipe reaches an accuracy over a link of a given rate, by method.

    python -m benchmarks.time_to_accuracy --rate-mbit 1000 --methods none,fp16_hook,powersgd_hook,dgc --seeds 0,1,2

Methods are what `gradcomp compressor=...` takes, with further overrides after a colon
(`dgc:compressor.values=bf16;trainer.max_epochs=8`), and torch's own hooks in Lightning's DDPStrategy. Every run is the
whole recipe, on nodes that benchmarks.link starts; the clock is rank 0's, starts with `fit` and runs on during
validation. Bytes are those that the kernel has counted on all nodes, headers and all. Methods take turns, seed by seed.
Where the machine has a GPU, the nodes share it, and gloo carries what they exchange.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import hydra
import lightning as L
from lightning.pytorch.strategies import DDPStrategy
from matplotlib.axes import Axes
from omegaconf import OmegaConf
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import report
from benchmarks.methods import with_hook
from lightning_gradcomp.app import compose
from lightning_gradcomp.app.messages import hide_messages
from lightning_gradcomp.plugin import CommunicationMonitor

HOOKS = ("ddp", "fp16_hook", "powersgd_hook", "no_exchange")
DENSE_STEPS = 22
"""Before torch's PowerSGD hook starts: as many as lgc.PowerSGD has by default."""

Curve = list[tuple[float, float]]
"""(seconds, validation accuracy) after each epoch."""


class HookStrategy(DDPStrategy):
    """Lightning's DDPStrategy with one of torch's hooks, which Lightning would register on a GPU alone."""

    def __init__(self, method: str, **_: Any) -> None:  # others: the compressor of the config
        super().__init__()
        self._method = method

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return with_hook(self._method, model, DENSE_STEPS)


class Clock(L.Callback):
    """Notes when each validation ended, and with what."""

    def __init__(self) -> None:
        self.curve: Curve = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.begin = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.curve.append((time.perf_counter() - self.begin, trainer.callback_metrics["val_acc"].item()))


def train(folder: Path) -> None:
    """One rank of the run that config.yaml in `folder` describes; rank 0 writes curve.json."""
    hide_messages()
    compose.register()
    config: Any = OmegaConf.load(folder / "config.yaml")
    run, clock = compose.build(config), Clock()
    trainer: Any = run.trainer
    if "method" in config.strategy:  # CommunicationMonitor is for the strategies of lightning_gradcomp
        trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, CommunicationMonitor)]
    trainer.callbacks.append(clock)
    trainer.strategy._process_group_backend = "gloo"  # the nodes share this machine's GPU; NCCL would refuse that
    trainer.fit(run.task, run.data)
    if trainer.is_global_zero:
        (folder / "curve.json").write_text(json.dumps(clock.curve))


def curve(method: str, seed: int, link: list[str]) -> tuple[Curve, int]:
    """Run a recipe over the link. What it was, and the bytes that all nodes have sent."""
    name, _, more = method.partition(":")
    overrides = [f"compressor={'none' if name in HOOKS else name}", f"seed={seed}", "trainer.enable_progress_bar=false"]
    compose.register()
    with hydra.initialize_config_dir(str(compose.shipped("conf")), version_base="1.3"):
        config = hydra.compose("train", [*overrides, *(word for word in more.split(";") if word)])
    if name in HOOKS:
        config.strategy = {"_target_": "benchmarks.time_to_accuracy.HookStrategy", "method": name}
    with tempfile.TemporaryDirectory() as folder:
        config.folder = folder
        OmegaConf.save(config, Path(folder, "config.yaml"))
        command = [sys.executable, "-m", "benchmarks.link", *link, "--", sys.executable, "-m", __spec__.name]
        done = subprocess.run([*command, "--train", folder], stdout=subprocess.PIPE, text=True)
        sent = re.findall(r"node \d+ sent ([\d,]+) bytes", done.stdout)
        if done.returncode or not sent:
            sys.exit(done.stdout)
        points = [tuple(point) for point in json.loads(Path(folder, "curve.json").read_text())]
        return points, sum(int(num_bytes.replace(",", "")) for num_bytes in sent)


def reached(points: Curve, accuracy: float) -> float:
    """Seconds until `accuracy`; infinite where it never came."""
    return next((seconds for seconds, now in points if now >= accuracy), float("inf"))


def draw(curves: dict[str, list[Curve]], accuracy: float) -> Callable[[Axes], None]:
    """A line a run, a colour a method."""

    def on(axes: Axes) -> None:
        for number, (method, runs) in enumerate(curves.items()):
            for run, points in enumerate(runs):
                axes.plot(*zip(*points, strict=True), color=f"C{number}", label=None if run else method, marker=".")
        axes.axhline(accuracy, color="grey", linewidth=0.8)
        axes.set(xlabel="seconds", ylabel="validation accuracy", ylim=(max(0.0, 2 * accuracy - 1.02), 1))
        axes.legend()

    return on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="none,dgc")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--accuracy", type=float, default=0.98)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rate-mbit", type=float, default=1000)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--out", type=Path, help="a folder for time_to_accuracy.json and .png")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train)
        return
    link = [f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in ("rate-mbit", "delay-ms")]
    link = ["--nodes", str(arguments.nodes), *link]
    curves: dict[str, list[Curve]] = {method: [] for method in arguments.methods.split(",")}
    sent: dict[str, list[int]] = {method: [] for method in curves}
    for seed in arguments.seeds.split(","):
        for method, runs in curves.items():
            points, num_bytes = curve(method, int(seed), link)
            runs.append(points)
            sent[method].append(num_bytes)
            print(f"{method}, seed {seed}: {num_bytes:,} bytes, {points}", flush=True)
    rows = []
    for method, runs in curves.items():
        times = [reached(points, arguments.accuracy) for points in runs]
        whole = [points[-1][0] for points in runs]
        each = ", ".join(f"{seconds:.0f}" for seconds in times)
        wholes = ", ".join(f"{seconds:.0f}" for seconds in whole)
        megabytes = f"{median(sent[method]) / 1e6:,.1f}"
        rows.append([method, f"{median(times):.0f} ({each})", f"{median(whole):.0f} ({wholes})", megabytes])
    print(f"\n{report.machine()}, N={arguments.nodes}, {arguments.rate_mbit:g} Mbit/s, {arguments.delay_ms:g} ms")
    head = ["method", f"seconds to {arguments.accuracy:.0%} (each seed)", "whole run", "MB sent by all nodes"]
    print(report.table(head, rows))
    figures = {method: {"curves": runs, "sent": sent[method]} for method, runs in curves.items()}
    report.write(arguments.out, "time_to_accuracy", figures, vars(arguments), draw(curves, arguments.accuracy))


if __name__ == "__main__":
    main()
