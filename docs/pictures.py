"""Draws the charts of README and docs: `python -m docs.pictures`, after data or methods have changed.

Their figures come from docs/data/*.csv and from the byte formulas of the compressors. Charts are five inches wide, so
that their words can be read on a telephone. The other files of docs/pictures/ are drawings, which are edited by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
import torch
import torchvision
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

import lightning_gradcomp as lgc
from benchmarks import language_models, methods, report, results, time_to_accuracy
from benchmarks import rotation as rotation_of_a_gradient
from benchmarks import step_time as step_times
from docs.tables import ratio
from lightning_gradcomp.app.plan import BACKWARD, HIDES, given_link
from lightning_gradcomp.compressors.kernels.eden import LEVELS, UNIT

FOLDER = Path(__file__).with_name("pictures")
GREY, BLUE, ORANGE, GREEN, VIOLET = "#59636e", "#0969da", "#bc4c00", "#1a7f37", "#8250df"
"""Legible on white, which is the ground of all charts but the README's."""

STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "gradcomp", "font.size": 10, "font.family": "sans-serif",
    "text.color": GREY, "axes.edgecolor": GREY, "axes.labelcolor": GREY, "xtick.color": GREY, "ytick.color": GREY,
    "axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "white", "axes.facecolor": "none",
}  # fmt: skip


class Theme(NamedTuple):
    """Colours of the README's picture, which GitHub shows on one of two grounds."""

    text: str
    bar: str
    highlight: str


LIGHT = Theme("#1f2328", "#afb8c1", "#0969da")
DARK = Theme("#e6edf3", "#6e7681", "#4493f8")
HERO = {"ddp": "DDP", "fp16_hook": "fp16 hook", "powersgd_hook": "PowerSGD hook", "dgc": "dgc"}
RATES = (100, 1000, 10_000)


def hero(axes: Axes, theme: Theme) -> None:
    """Time of the same training over three links, by method."""
    runs = time_to_accuracy.read_csv()
    times = {(rate, method): time_to_accuracy.seconds(runs, method, rate) for rate in RATES for method in HERO}
    alone = median(each.seconds for each in runs if each.method == time_to_accuracy.COMPUTATION)
    longest = max(each for each in times.values() if each and each < 8 * alone)
    ticks: list[str] = []
    for rate in RATES:
        ticks += ["", step_times.link(rate)]
        for method, name in HERO.items():
            seconds, color, place = times[rate, method], theme.bar, len(ticks)
            if seconds is None:
                continue
            if method == "dgc":
                color = theme.highlight
            end = seconds
            if seconds > longest:
                end = _broken(axes, place, longest, color)
            else:
                axes.barh(place, end, height=0.7, color=color)
            if seconds > longest or method in ("ddp", "dgc"):
                axes.text(end + 0.02 * longest, place, clock(seconds), va="center", color=theme.text)
            ticks.append(name)
    axes.axvline(alone, 0.02, 0.97, color=theme.text, linewidth=1, linestyle=(0, (3, 3)))
    axes.text(alone, 0, " computation alone", color=theme.text, va="center")
    words = [f"{name} {time_to_accuracy.accuracy(runs, method):.1f} %" for method, name in HERO.items()]
    axes.set_xlabel(f"accuracy: {', '.join(words[:2])},\n{', '.join(words[2:])}", color=theme.text, loc="left")
    axes.set_yticks(range(len(ticks)), ticks, color=theme.text)
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if "bit/s" in label.get_text() else "normal")
    axes.tick_params(length=0)
    axes.set(xlim=(0, 1.4 * longest), ylim=(len(ticks) - 0.4, -0.6), xticks=[])
    axes.figure.patch.set_visible(False)
    axes.spines[:].set_visible(False)


def _broken(axes: Axes, place: float, longest: float, color: str) -> float:
    """A bar that continues beyond the axis, with a gap in it. Where it ends."""
    low, high, slant = place + 0.35, place - 0.35, 0.01 * longest
    cut, end = 1.02 * longest, 1.15 * longest
    after = cut + 0.03 * longest
    axes.fill([0, cut - slant, cut + slant, 0], [low, low, high, high], color=color, linewidth=0)
    axes.fill([after - slant, end, end, after + slant], [low, low, high, high], color=color, linewidth=0)
    return end


def clock(seconds: float) -> str:
    """Seconds, or minutes from 100 s on.

    >>> clock(96.4), clock(930)
    ('96 s', '16 min')
    """
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.2g} min"


def warm_up(axes: Axes) -> None:
    """Density by epoch, of 22 steps as in recipe=digits: the default, and the paper's warm-up."""
    paper = lgc.DGC(sparsity=0.999, values="fp32", warmup_epochs=4)
    for label, compressor, color in (("DGC()", lgc.DGC(), BLUE), ("the paper's", paper, ORANGE)):
        schedule = compressor.schedule()
        density = [100 * (1 - schedule(step // 22, step)) for step in range(220)]
        axes.step([step / 22 for step in range(221)], [*density, density[-1]], where="post", color=color)
        axes.text(10.1, density[-1], f"{label}: {density[-1]:.3g} %", color=color, va="center")
    axes.set(yscale="log", xlabel="epoch", ylabel="entries sent", xlim=(0, 15), xticks=range(0, 11, 2))
    axes.set_yticks([0.1, 1, 10, 100], ["0.1 %", "1 %", "10 %", "100 %"])
    axes.minorticks_off()
    axes.spines["bottom"].set_bounds(0, 10)


def step_time(axes: Axes) -> None:
    """Step time over computation of ResNet-18, by the rate of the link."""
    found = step_times.of_network("torchvision.resnet18")
    names = {"ddp": "DDP", "fp16_hook": "fp16 hook", "onebit@all_gather": "onebit", "dgc@all_gather": "dgc"}
    for (method, name), color in zip(names.items(), (ORANGE, VIOLET, GREEN, BLUE), strict=True):
        times = [found[rate, method].ms / found[rate, method].compute_ms for rate in RATES]
        axes.plot(RATES, times, "o-", color=color, markersize=4)
        axes.text(90, times[0], name, color=color, ha="right", va="center")
    axes.set(xscale="log", yscale="log", xlabel="link", ylabel="step time over computation", xlim=(25, 11_000))
    axes.set_xticks(RATES, [step_times.link(rate) for rate in RATES])
    axes.set_yticks(ticks := [1, 2, 5, 10, 20, 50], [f"{tick}x" for tick in ticks])
    axes.minorticks_off()


IN_THE_MAP = {
    "ddp": ("DDP", lgc.NoCompression(), "#d0d7de"),
    "fp16_hook": ("ddp_bf16", lgc.BF16(), "#d8b9ff"),
    "int8": ("ddp_int8", lgc.Int8(), "#8ddb8c"),
    "eden": ("eden", lgc.EDEN(), "#f6c343"),
    "eden:bits=2": ("eden, 2 bits", lgc.EDEN(bits=2), "#ff9a62"),
    "dgc@all_gather": ("dgc", lgc.DGC(), "#54aeff"),
}
"""Method in step_times.csv -> name, compressor and colour, in the order in which they are preferred."""


def which_method(axes: Axes) -> None:
    """The first method with which a step of ResNet-50 takes at most twice its computation, by link and computation."""
    steps = step_times.of_network("torchvision.resnet50")
    with torch.device("meta"):
        model = torchvision.models.resnet50()
    elements = sum(parameter.numel() for parameter in model.parameters())
    megabits, computation = np.meshgrid(np.logspace(2, 4, 400), np.logspace(-1, 1, 400))
    chosen = np.full(megabits.shape, len(IN_THE_MAP) - 1)
    for number, (method, (_, compressor, _)) in reversed([*enumerate(IN_THE_MAP.items())]):
        exchange = 4 * elements / ratio(compressor, model) / given_link(1, 0).bandwidth / megabits
        hidden = 0 if number == len(IN_THE_MAP) - 1 else HIDES * BACKWARD * computation
        step = steps[10_000, method]
        longer = (step.ms - step.compute_ms) / 1000 + np.maximum(exchange - hidden, 0)
        chosen[longer <= computation] = number
    colors = [color for *_, color in IN_THE_MAP.values()]
    axes.pcolormesh(megabits, computation, chosen, cmap=ListedColormap(colors), vmin=0, vmax=5, rasterized=True)
    for name, _, color in IN_THE_MAP.values():
        axes.fill([], [], color=color, label=name)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(-0.15, 1), ncols=3, labelcolor=GREY)
    axes.set(xscale="log", yscale="log", xlabel="link", ylabel="a step computes for")
    axes.set_xticks(RATES, [step_times.link(rate) for rate in RATES])
    axes.set_yticks([0.1, 1, 10], ["0.1 s", "1 s", "10 s"])
    axes.minorticks_off()


ON_DIGITS = {
    "eden": "eden",
    "eden bits=2": "eden bits=2",
    "dgc": "dgc",
    "dgc dense_values=int8": "dgc",
    "powersgd": "powersgd",
    "onebit": "onebit",
    "sparseloco K=8 D=0": "sparseloco",
}
"""Method -> its name in the picture of accuracies."""


def accuracy(axes: Axes) -> None:
    """Differences to dense of five folds, with 95 % intervals: a row a network and method, two marks a row."""
    found = results.cross_validated(results.read_csv())
    left, ticks = -9, []
    for model, title in results.TITLES.items():
        ticks += ["", title] if ticks else [title]
        settings = [setting for setting in results.SETTINGS if setting.model == model]
        for method, name in ON_DIGITS.items():
            if not any(method in found[setting] for setting in settings):
                continue
            for setting, color, beside in zip(settings, (BLUE, ORANGE), (-0.17, 0.17), strict=True):
                if runs := found[setting].get(method):
                    points = report.differences(runs, found[setting]["none"])
                    middle, half, place = mean(points), report.half_width(points), len(ticks) + beside
                    axes.plot([max(left, middle - half), middle + half], [place, place], color=color, linewidth=1.2)
                    axes.plot(middle, place, "o", color=color, markersize=4)
                    if middle - half < left:
                        axes.plot(left, place, "<", color=color, markersize=4, clip_on=False)
            ticks.append(name)
    for ranks, color in ((2, BLUE), (8, ORANGE)):
        axes.plot([], [], "o-", color=color, markersize=4, label=f"{ranks} ranks")
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderpad=0)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.set_yticks(range(len(ticks)), ticks, fontsize=9)
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if "," in label.get_text() else "normal")
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(left, 7), ylim=(len(ticks) - 0.4, -0.6), xlabel="accuracy minus dense, points")
    axes.spines["left"].set_visible(False)


ON_GPT_SMALL = {
    "ddp": None,
    "fp16_hook": None,
    "int8": "int8",
    "eden": "eden",
    "eden:bits=2": "eden bits=2",
    "dgc:dense_values=int8": "dgc dense_values=int8",
}
"""Method in step_times.csv -> its label in text.csv; None: as dense."""


class Curve(NamedTuple):
    """How a method is drawn."""

    name: str
    method: str
    optimizer: str
    color: str
    beside: tuple[float, float] = (0, -9)
    """Points from the curve's end to the middle of its name."""
    end: int = -1
    """0: the name is at its beginning."""


CURVES = (
    Curve("dense", "none", "AdamW", ORANGE, (22, 0)),
    Curve("onebit", "onebit", "AdamW", GREEN),
    Curve("eden", "eden", "AdamW", VIOLET, (0, 9), 0),
    Curve("dgc", "dgc dense_values=int8", "AdamW", BLUE),
    Curve("sparseloco", "sparseloco K=8 D=0", "AdamW", GREY),
    Curve("dense, Muon", "none", "Muon", ORANGE),
    Curve("muloco, Muon", "muloco K=30 D=0", "Muon", GREY),
)
"""Of language models; those with Muon are dashed."""


def loss_by_bytes(axes: Axes) -> None:
    """Validation loss of a small GPT against bytes sent, two ranks, means over seeds: those methods that have runs."""
    for each in CURVES:
        if points := language_models.curve(each.method, each.optimizer, language_models.STEPS):
            sent, losses = zip(*points, strict=True)
            axes.plot(sent, losses, color=each.color, linestyle="--" if each.optimizer == "Muon" else "-")
            style = {"textcoords": "offset points", "ha": "center", "va": "center", "color": each.color}
            axes.annotate(each.name, (sent[each.end], losses[each.end]), each.beside, **style)
    axes.margins(y=0.1)
    axes.set(xscale="log", xlabel="sent by a rank", ylabel="validation loss, nats per byte", xlim=(1e4, 2e9))
    axes.set_xticks([1e4, 1e5, 1e6, 1e7, 1e8, 1e9], ["10 kB", "100 kB", "1 MB", "10 MB", "100 MB", "1 GB"])
    axes.minorticks_off()


def loss_by_steps(axes: Axes) -> None:
    """What methods lose against dense training of the same length, by that length."""
    for ranks, line in ((2, "--"), (8, "-")):
        for name, method, color in (
            ("powersgd", "powersgd", GREY),
            ("dgc", "dgc dense_values=int8", BLUE),
            ("onebit", "onebit", GREEN),
            ("eden", "eden", ORANGE),
            ("eden, 2 bits", "eden bits=2", VIOLET),
        ):
            steps, losses = zip(*language_models.by_length(method, ranks).items(), strict=True)
            axes.plot(steps, losses, "o", linestyle=line, color=color, markersize=4, label=f"{name}, {ranks} ranks")
    axes.legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(-0.15, 1), ncols=2)
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set(xscale="log", xlabel="steps", ylabel="loss minus dense, nats per byte")
    axes.set_xticks(language_models.LONG, [f"{steps:,}" for steps in language_models.LONG])
    axes.minorticks_off()


def gpt_small(axes: Axes) -> None:
    """What a step of GPT-2 small takes over two links, and what the method costs a small GPT on two and eight ranks."""
    steps, names = step_times.of_network("gpt_small"), []
    for place, (method, label) in enumerate(ON_GPT_SMALL.items()):
        fast, slow = (steps[rate, method].ms / 1000 for rate in (1000, 100))
        color = BLUE if label else GREY
        axes.plot([fast, slow], [place, place], color=color, linewidth=1.2)
        axes.plot(fast, place, "o", color=color, markerfacecolor="white")
        axes.plot(slow, place, "o", color=color)
        losses = [language_models.by_length(label, ranks)[language_models.STEPS] for ranks in (2, 8)] if label else []
        name = methods.title(method).replace("`", "").removeprefix("torch's ")
        names.append("\n".join([name, ", ".join(f"{loss:+.3f}" for loss in losses) or "0"]))
    for label, face in (("1 Gbit/s", "white"), ("100 Mbit/s", GREY)):
        axes.plot([], [], "o", color=GREY, markerfacecolor=face, label=label)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderpad=0)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="a step of GPT-2 small", xlim=(2, 60))
    axes.set_xticks(ticks := [2, 5, 10, 20, 50], [f"{tick} s" for tick in ticks])
    axes.minorticks_off()


def rotation(axes: Axes) -> None:
    """Entries of a gradient before and after EDEN's rotation, and the levels of two bits."""
    found = pd.read_csv(rotation_of_a_gradient.CSV)
    edges = [*found["from"], -found["from"][0]]
    axes.stairs(found["before"], edges, color=ORANGE, label="the gradient")
    axes.stairs(found["after"], edges, color=BLUE, fill=True, alpha=0.45, label="rotated")
    levels = [sign * level / UNIT for level in LEVELS[2] for sign in (-1, 1)]
    axes.plot(levels, [1e-4] * len(levels), "^", color=GREEN, clip_on=False, zorder=3, label="levels of 2 bits")
    axes.legend(frameon=False)
    axes.set(xlabel="entry, in root mean squares of its block", ylabel="density", xlim=(-6, 6))
    axes.set(yscale="log", ylim=(1e-4, 10))
    axes.set_yticks(ticks := [1e-4, 1e-2, 1], [f"{each:g}" for each in ticks])
    axes.minorticks_off()


def latency(axes: Axes) -> None:
    """Step time over computation alone, by the link's delay, two ranks."""
    found = step_times.read_csv("small")
    names = {"ddp": "DDP", "local": "local SGD, K=8", "dga": "dga, K=D=8", "auto": 'dga, delay="auto"'}
    axes.fill_between([0, 100], 0.85, 1.15, color=GREY, alpha=0.2, linewidth=0)
    axes.text(75, 1.05, "noise", va="center", ha="center", fontsize=9)
    for method, color in zip(names, (ORANGE, GREEN, VIOLET, BLUE), strict=True):
        lines = [each for each in found if each.method == method]
        ratios = [each.ms / each.compute_ms for each in lines]
        axes.plot([each.delay_ms for each in lines], ratios, marker=".", color=color)
        axes.text(103, ratios[-1], names[method], color=color, va="center")
    axes.set(xlabel="one-way delay, ms", ylabel="step time over computation", yscale="log", xlim=(-3, 190))
    axes.set_yticks(ticks := [1, 2, 5, 10, 20], [f"{tick}x" for tick in ticks])
    axes.set_xticks(range(0, 101, 25))
    axes.minorticks_off()
    axes.spines["bottom"].set_bounds(-3, 100)


Picture = tuple[Callable[[Axes], None], tuple[float, float]]
"""What draws it, and its size in inches."""

PICTURES: dict[str, Picture] = {
    "hero_light": (partial(hero, theme=LIGHT), (5, 4)),
    "hero_dark": (partial(hero, theme=DARK), (5, 4)),
    "warm_up": (warm_up, (5, 3)),
    "step_time": (step_time, (5, 3.2)),
    "which_method": (which_method, (5, 3.6)),
    "loss_by_bytes": (loss_by_bytes, (5, 3.6)),
    "loss_by_steps": (loss_by_steps, (5, 3.6)),
    "gpt_small": (gpt_small, (5, 3.8)),
    "accuracy": (accuracy, (5, 4.6)),
    "latency": (latency, (5, 3.2)),
    "rotation": (rotation, (5, 3.0)),
}


def draw(folder: Path, names: Sequence[str] = ()) -> None:
    """Write pictures into `folder`: those of these names, or all."""
    folder.mkdir(exist_ok=True)
    for name in names or PICTURES:
        on, size = PICTURES[name]
        with mpl.rc_context(STYLE):
            figure = Figure(figsize=size, layout="constrained")
            on(figure.subplots())
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    import sys

    draw(FOLDER, sys.argv[1:])
