"""What `gradcomp plan` prints, draws and writes."""

from __future__ import annotations

import json
import math
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lightning_gradcomp.app.plan.forecast import Forecast, Link
from lightning_gradcomp.app.plan.workload import Workload

MANY = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Numbers of ranks for which speed-ups are modelled."""

LETTERS = {"all_gather": "a", "two_phase": "t", "server": "s", "ring": "r"}
LEGEND = "a: all_gather, t: two_phase, s: server, r: ring all-reduce"

PER_DECADE = 12
"""Bandwidths of the figure, between 10 Mbit/s and 100 Gbit/s."""


@dataclass(frozen=True)
class Report:
    """One plan.

    Args:
        workload: what was measured.
        forecast: the model of its steps.
        links: description -> link.
        workers: N.
        device: where it was measured.
        measured_on: number of ranks that measured at the same time.
        step_ms: of a step that was measured elsewhere.
        run: epochs, and steps an epoch, of a whole run.
    """

    workload: Workload
    forecast: Forecast
    links: dict[str, Link]
    workers: int
    device: torch.device
    measured_on: int
    step_ms: float | None = None
    run: tuple[int, int] | None = None

    def text(self) -> str:
        """The whole report; the table by number of ranks for one link alone."""
        parts = [self.head(), self.methods()]
        if self.run:
            parts.append(self.whole_run(*self.run))
        if len(self.links) == 1:
            parts.append(self.many())
        advice = [f"{words}: {self._advice(link)}" for words, link in self.links.items()]
        return "\n\n".join([*parts, "\n".join(advice)])

    def _advice(self, link: Link) -> str:
        return self.forecast.advice(self.workers, link, self.workload.corrected)

    def head(self) -> str:
        """What was measured, and when the dense exchange costs nothing."""
        forecast, n = self.forecast, self.workers
        computation, dense = forecast.computation, forecast.bytes("none", "ring", n)
        lines = [
            f"{self.workload.name}: {forecast.elements:,} trainable parameters, "
            f"{dense.payload / 1e6:.1f} MB of gradients in fp32",
            f"a step {'there' if self.step_ms else 'here'} takes {1e3 * computation.seconds:.1f} ms without an "
            f"exchange, "
            f"{1e3 * computation.backward:.1f} of them backward ({self._computation_from()})",
        ]
        for words, link in self.links.items():
            to_hide = forecast.bandwidth_to_hide(n, link.latency)
            hides = "no bandwidth hides it, its latency alone is longer"
            if math.isfinite(to_hide):
                hides = f"it hides behind backward from {to_hide * 8e-9:.3g} Gbit/s on"
            lines.append(
                f"dense exchange over {words}: {dense.sent / 1e6:.1f} MB sent a rank, {hides} (modelled, N={n})"
            )
        return "\n".join(lines)

    def _computation_from(self) -> str:
        measured = f"batch {self.workload.batch} a rank, {_ranks(self.measured_on)}, {self.place()}"
        if self.step_ms:
            return f"as given; the share of backward, and the work of the methods, measured here: {measured}"
        return f"measured: {measured}"

    def place(self) -> str:
        """The device, and the versions."""
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
        else:
            name = f"CPU ({platform.machine()}), threads: {torch.get_num_threads()}"
        return f"{name}, torch {version('torch')}"

    def methods(self) -> str:
        """Every method at N."""
        n, alone = self.workers, len(self.links) == 1
        head = ["method", "compress ms", "payload bytes"]
        for words in self.links:
            where = "" if alone else f" over {words}"
            head += ["bytes sent"] * alone + [f"modelled ms a step{where}", f"modelled to dense, N={n}"]
        columns = [{step.method: step for step in self.forecast.table(n, link)} for link in self.links.values()]
        rows = []
        for method, first in columns[0].items():
            work = self.forecast.methods[method][1]
            row = [self._word(method), f"{1e3 * work.encode:.1f}", f"{first.bytes.payload:,}"]
            for steps in columns:
                step = steps[method]
                row += [f"{step.bytes.sent:,}"] * alone
                row += [f"{1e3 * step.seconds:.1f}", f"{step.speed_up:.2f}x {LETTERS[step.topology]}"]
            rows.append(row)
        title = f"A step with each method at its best topology ({LEGEND}), N={n}:\n\n"
        return title + table(head, rows)

    def whole_run(self, epochs: int, steps: int) -> str:
        """Every method's whole run at N, its warm-up included."""
        rows = []
        for words, link in self.links.items():
            runs = [self.forecast.run(method, self.workers, link, epochs, steps) for method in self.forecast.methods]
            for run in sorted(runs, key=lambda run: run.seconds):
                gigabytes = f"{run.sent / 1e9:.3g}"
                cells = [f"{run.seconds / 60:.3g}", f"{run.speed_up:.2f}x", gigabytes, f"{run.ratio:.3g}x"]
                rows.append([self._word(run.method), words, *cells])
        head = ["method", "link", "minutes", "to dense", "GB sent", "fewer than dense"]
        what = f"{epochs} epochs of {steps} steps, warm-ups included, validation left out"
        title = f"Modelled run of {what}, N={self.workers}"
        return f"{title}:\n\n{table(head, rows)}"

    def _word(self, method: str) -> str:
        unfit = self.forecast.needs_optimizer(method) and not self.workload.corrected
        return f"{method} (SGD and Adam only)" if unfit else method

    def many(self) -> str:
        """Speed-ups by number of ranks."""
        [(words, link)] = self.links.items()
        rows = []
        for step in self.forecast.table(self.workers, link):
            steps = [self.forecast.best(step.method, n, link) for n in MANY]
            cells = [f"{one.speed_up:.2f}x {LETTERS[one.topology]}" for one in steps]
            rows.append([self._word(step.method), *cells])
        title = f"Modelled speed-up over dense at the same N and link ({words}), each at its best topology:\n\n"
        return title + table(["method", *(f"N={n}" for n in MANY)], rows)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        forecast = self.forecast
        return {
            "model": self.workload.name,
            "trainable_parameters": forecast.elements,
            "batch_a_rank": self.workload.batch,
            "N": self.workers,
            "run": self.run,
            "measured": {
                "place": self.place(),
                "ranks": self.measured_on,
                "computation": asdict(forecast.computation),
                "work": {name: asdict(work) for name, (_, work) in forecast.methods.items()},
            },
            "modelled": {words: self._modelled(link) for words, link in self.links.items()},
        }

    def _modelled(self, link: Link) -> dict[str, Any]:
        forecast = self.forecast
        to_hide = forecast.bandwidth_to_hide(self.workers, link.latency)
        return {
            "link": asdict(link),
            "bandwidth_to_hide_dense": to_hide if math.isfinite(to_hide) else None,
            "advice": self._advice(link),
            "runs": [asdict(forecast.run(m, self.workers, link, *self.run)) for m in forecast.methods]
            if self.run
            else [],
            "dense_seconds": {n: forecast.dense(n, link) for n in sorted({*MANY, self.workers})},
            "steps": [
                asdict(step)
                for n in sorted({*MANY, self.workers})
                for method, (compressor, _) in forecast.methods.items()
                for step in forecast.every(method, n, link)
            ],
        }

    def draw(self, axes: Any) -> None:
        """Speed-up over bandwidth at N, on matplotlib's `axes`."""
        links = list(self.links.values())
        megabits = [10 ** (1 + step / PER_DECADE) for step in range(4 * PER_DECADE + 1)]
        swept = [links[0].at(mbit * 1e6 / 8) for mbit in megabits]
        for method, style in zip(self.forecast.methods, ["-", "--", "-.", ":"] * 9, strict=False):
            if method != "none":
                axes.plot(
                    megabits,
                    [self.forecast.best(method, self.workers, link).speed_up for link in swept],
                    style,
                    label=method,
                )
        axes.axhline(1.0, color="black", linewidth=0.8)
        for link in links:
            axes.axvline(link.bandwidth * 8e-6, color="grey", linewidth=0.8)
        axes.set(
            xscale="log",
            yscale="log",
            xlabel=f"bandwidth of a rank in Mbit/s ({1e3 * links[0].latency:.2g} ms a hop)",
            ylabel=f"modelled speed-up over dense, N={self.workers}",
            title=f"{self.workload.name}, batch {self.workload.batch} a rank, best topology",
        )
        axes.legend(fontsize="small")


def write(report: Report, folder: Path) -> None:
    """plan.json, plan.png and plan.svg in `folder`."""
    from matplotlib.figure import Figure  # of the extra `recipes`

    (folder / "plan.json").write_text(json.dumps(report.as_dict(), indent=2) + "\n")
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    report.draw(figure.subplots())
    for name in ("plan.png", "plan.svg"):
        figure.savefig(folder / name, dpi=150)
    print(f"written: {folder / 'plan.json'}, plan.png, plan.svg")


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown, in columns."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def _ranks(number: int) -> str:
    return "one rank alone" if number == 1 else f"{number} ranks at the same time"
