"""Draws the pictures of the pages, docs/pictures/*.svg: `python -m docs.pictures`, after data or methods have changed.

Bars and lines come from results.csv, step_times.csv, the table of methods/dga.md and the byte formulas of the
registered compressors. Pictures are five inches wide, so that their words can be read on a telephone.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Callable
from math import cos, pi, sin
from pathlib import Path
from statistics import mean, stdev

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import lightning_gradcomp as lgc
from benchmarks import step_times
from docs.tables import MODELS, step
from lightning_gradcomp.app.models import NETWORKS

FOLDER = Path(__file__).with_name("pictures")
GREY, BLUE, ORANGE, GREEN = "#747b84", "#337ab7", "#b8691c", "#3a8450"
"""Legible on white and on black; the ground is transparent."""

STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "gradcomp", "font.size": 10, "font.family": "sans-serif",
    "text.color": GREY, "axes.edgecolor": GREY, "axes.labelcolor": GREY, "xtick.color": GREY, "ytick.color": GREY,
    "axes.spines.top": False, "axes.spines.right": False, "savefig.transparent": True,
}  # fmt: skip


def bytes_by_method(axes: Axes) -> None:
    """Bytes of a step of ResNet-18, by the formulas, two ranks."""
    model = NETWORKS[MODELS["ResNet-18"]](channels=1, classes=10, size=8)
    dense = 4 * sum(parameter.numel() for parameter in model.parameters())
    known = sorted((dense / step(entry.cls(), model)[1], entry.name) for entry in lgc.entries())
    names = [name for _, name in known]
    axes.barh(names, [size for size, _ in known], color=[BLUE if name == "dgc" else GREY for name in names])
    for place, (size, _) in enumerate(known):
        axes.text(size * 1.1, place, f"{size / 1e6:.3g} MB, {dense / size:.0f}x", va="center")
    axes.set(xscale="log", xlabel="bytes that a rank sends in a step", xlim=(3e4, 4e9))


def accuracy_over_bytes(axes: Axes) -> None:
    """Whole runs of ResNet-18 on the digits, seeds of the fixed split: mean and standard deviation."""
    runs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with (Path(__file__).with_name("data") / "results.csv").open() as file:
        for row in csv.DictReader(file):
            if row["model"] == "resnet18" and not row["fold"]:
                accuracy = 100 * int(row["correct"]) / int(row["images"])
                runs[row["method"]].append((int(row["bytes_sent"]) / 1e6, accuracy))
    known = sorted((mean(size for size, _ in points), method) for method, points in runs.items())
    names = [method for _, method in known]
    axes.barh(names, [size for size, _ in known], color=[BLUE if name == "dgc" else GREY for name in names])
    for place, (size, method) in enumerate(known):
        accuracies = [accuracy for _, accuracy in runs[method]]
        axes.text(size * 1.1, place, f"{mean(accuracies):.2f} ± {stdev(accuracies):.2f} %", va="center")
    axes.set(xscale="log", xlabel="MB that a rank sends in ten epochs; accuracy", xlim=(10, 1e6))


def warm_up(axes: Axes) -> None:
    """Density by epoch, of 22 steps as in recipe=digits: the default, and the paper's warm-up."""
    paper = lgc.DGC(sparsity=0.999, values="fp32", warmup_epochs=4)
    for label, compressor, color in (("DGC()", lgc.DGC(), BLUE), ("the paper's", paper, ORANGE)):
        schedule = compressor.schedule()
        density = [100 * (1 - schedule(step // 22, step)) for step in range(220)]
        axes.step([step / 22 for step in range(221)], [*density, density[-1]], where="post", color=color)
        axes.text(10.1, density[-1], f"{label}: {density[-1]:.3g} %", color=color, va="center")
    axes.set(yscale="log", xlabel="epoch", ylabel="elements sent, %", xlim=(0, 15), xticks=range(0, 11, 2))


Span = tuple[str, float, float, str]
"""Row, begin, length, colour."""

BACKWARD = 87.0
"""ms of a step's computation."""


def timelines(axes: Axes) -> None:
    """Two steps over 1 Gbit/s, dense and compressed; delayed and asynchronous ones, where exchange and computation
    overlap."""
    steps = {each.method: each for each in step_times.read_csv() if each.rate_mbit == 1000}
    dense, dgc = steps["ddp"].ms, steps["dgc"]
    compute = steps[step_times.COMPUTATION].ms
    encode, exchange, decode = (float(ms or 0) for ms in (dgc.compress_ms, dgc.exchange_ms, dgc.decompress_ms))
    spans: list[Span] = []
    for number in range(2):
        begin = number * dense
        spans += [("DDP", begin, compute, BLUE)]
        spans += [("  link", begin + compute - BACKWARD, dense - compute + BACKWARD, ORANGE)]
        begin = number * (compute + encode + exchange + decode)
        spans += [("compressed", begin, compute, BLUE), ("compressed", begin + compute, encode, GREEN)]
        begin += compute + encode
        spans += [("link ", begin, exchange, ORANGE), ("compressed", begin + exchange, decode, GREEN)]
    for number in range(6):
        spans += [("delayed", number * compute, compute - 3, BLUE)]
        if number % 2 == 1:
            spans += [(" link", (number + 1) * compute, 1.6 * compute, ORANGE)]
    for number in range(4):
        spans += [("async., fast", number * (compute + 40), compute, BLUE)]
        spans += [("async., fast", number * (compute + 40) + compute, 37, ORANGE)]
    spans += [("async., slow", 0, 4 * compute, BLUE), ("async., slow", 4 * compute, 37, ORANGE)]
    rows = list(dict.fromkeys(row for row, *_ in spans))
    for row, begin, length, color in spans:
        axes.barh(rows.index(row), length, left=begin, color=color, height=0.6, edgecolor="none")
    for color, label in ((BLUE, "computation"), (GREEN, "encode, decode"), (ORANGE, "exchange")):
        axes.barh(0, 0, color=color, label=label)
    axes.set_yticks(range(len(rows)), [row.strip() for row in rows])
    axes.invert_yaxis()
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False)
    axes.set(xlabel="ms", xlim=(0, 900))


def latency(axes: Axes) -> None:
    """The rows of two ranks in the table of methods/dga.md: step time over computation alone, by the link's delay."""
    page = FOLDER.parent / "methods" / "dga.md"
    rows = re.findall(r"^\| (.*), N=2 \| (.*) \|$", page.read_text(), re.MULTILINE)
    for (name, cells), color in zip(rows, (ORANGE, GREEN, BLUE, GREY), strict=True):
        ratios = [float(ratio) for ratio in re.findall(r"([\d.]+)x", cells)]
        axes.plot((0, 10, 25, 50, 100), ratios, marker=".", color=color)
        axes.text(103, ratios[-1], name, color=color, va="center")
    axes.set(xlabel="one-way delay, ms", ylabel="step time over computation", yscale="log", xlim=(-3, 190))
    axes.set_yticks(ticks := [1, 2, 5, 10, 20], [f"{tick}x" for tick in ticks])
    axes.set_xticks(range(0, 101, 25))
    axes.minorticks_off()


def _box(axes: Axes, x: float, y: float, text: str, color: str = GREY) -> None:
    axes.text(
        x, y, text, ha="center", va="center", color=color,
        bbox={"boxstyle": "round,pad=0.4", "facecolor": "none", "edgecolor": color},
    )  # fmt: skip


Point = tuple[float, float]


def _arrow(axes: Axes, start: Point, stop: Point, color: str = GREY, *, bend: float = 0, shrink: float = 0) -> None:
    style = {"arrowstyle": "->", "color": color, "shrinkA": shrink, "shrinkB": shrink}
    axes.annotate("", stop, start, arrowprops={**style, "connectionstyle": f"arc3,rad={bend}"})


def step_of_dgc(axes: Axes) -> None:
    """What happens on a rank: gradient, momentum, velocity; the largest are sent, the rest is remembered."""
    axes.set(xlim=(0, 10), ylim=(0, 5.6))
    axes.axis("off")
    for text, x in (("gradient", 0.9), ("momentum u", 4.2), ("velocity v", 8)):
        _box(axes, x, 5, text)
    for start, stop in ((1.8, 2.9), (5.5, 6.8)):
        _arrow(axes, (start, 5), (stop, 5))
    _box(axes, 8, 2.9, "largest 0.4 %:\n2 bits and a place\neach, to all ranks", BLUE)
    _arrow(axes, (8.4, 4.6), (8.4, 3.8), BLUE)
    _box(axes, 4.2, 2.9, "the rest waits", ORANGE)
    _arrow(axes, (7, 4.6), (5, 3.4), ORANGE)
    _arrow(axes, (4.6, 3.4), (6.7, 4.7), ORANGE, bend=-0.2)
    _box(axes, 3, 0.6, "weights less the mean\nof what arrives", GREEN)
    _arrow(axes, (7, 2), (5.2, 0.9), GREEN)
    _arrow(axes, (4, 2.5), (3.5, 1.3), ORANGE)
    _arrow(axes, (1.4, 1.3), (0.9, 4.5), GREEN)


def topologies(axes: Axes) -> None:
    """Who sends what to whom: four ranks."""
    axes.set(xlim=(0, 10), ylim=(0, 11), aspect="equal")
    axes.axis("off")
    corners = [(1.2 * cos(pi / 4 + k * pi / 2), 1.2 * sin(pi / 4 + k * pi / 2)) for k in range(4)]
    for number, name in enumerate(("all_gather", "two_phase", "server", 'inside="dense"')):
        left, low = 2.5 + 5 * (number % 2), 8 - 5.6 * (number // 2)
        at = [(left + x, low + y) for x, y in corners]
        for i, start in enumerate(at):
            for j, stop in enumerate(at):
                across = name != 'inside="dense"' or (i in (0, 3)) != (j in (0, 3))
                if i != j and (name != 'inside="dense"' or not across or (i, j) in ((0, 1), (1, 0), (2, 3), (3, 2))):
                    back = name == "server" and i > j
                    color = GREY if not across else ORANGE if back else BLUE
                    _arrow(axes, start, stop, color, bend=0.12, shrink=6)
        for x, y in at:
            axes.plot(x, y, "o", color=GREY, markersize=9)
        notes = {
            "all_gather": "payloads to all",
            "two_phase": "shards to owners,\nmeans back compressed",
            "server": "shards to owners,\nmeans back dense",
        }
        axes.text(left, low + 2.1, name, ha="center", weight="bold")
        axes.text(left, low - 1.5, notes.get(name, "dense in a node,\npayloads between nodes"), ha="center", va="top")


PICTURES: dict[str, tuple[Callable[[Axes], None], tuple[float, float]]] = {
    "bytes_by_method": (bytes_by_method, (5, 3.2)),
    "accuracy_over_bytes": (accuracy_over_bytes, (5, 3.6)),
    "warm_up": (warm_up, (5, 3)),
    "timelines": (timelines, (5, 3.2)),
    "latency": (latency, (5, 3.2)),
    "step_of_dgc": (step_of_dgc, (5, 2.9)),
    "topologies": (topologies, (5, 5.2)),
}


def draw(folder: Path) -> None:
    """Write every picture into `folder`."""
    folder.mkdir(exist_ok=True)
    for name, (on, size) in PICTURES.items():
        with mpl.rc_context(STYLE):
            figure = Figure(figsize=size, layout="constrained")
            on(figure.subplots())
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    draw(FOLDER)
