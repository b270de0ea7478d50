"""The drawing of each figure, for the groups that have data for it."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from lightning_gradcomp.app.report.groups import Group
from lightning_gradcomp.app.report.runs import PHASES, RESIDUAL, SENT, SPARSITY, TIME, VALIDATED
from lightning_gradcomp.app.report.style import Look, finish, line, log_scale, looks, plain
from lightning_gradcomp.app.sizes import digits, human

BYTES = FuncFormatter(lambda size, _: human(size))
PLAIN = FuncFormatter(lambda number, _: f"{number:g}")
Shown = list[tuple[Group, Look]]


def accuracy_over_bytes(figure: Figure, shown: Shown) -> None:
    """Bytes on a logarithmic axis."""
    axes = figure.subplots()
    for group, look in shown:
        line(axes, group.curve(SENT, VALIDATED), look, plain(group.label), markers=True)
    log_scale(axes, "x", BYTES)
    axes.set_xlabel("gradient bytes sent by one rank (log scale)")
    axes.set_ylabel("validation accuracy")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    finish(figure, [axes])


def accuracy_over_time(figure: Figure, shown: Shown) -> None:
    """Seconds from 0."""
    axes = figure.subplots()
    for group, look in shown:
        line(axes, group.curve(TIME, VALIDATED), look, plain(group.label), markers=True)
    axes.set_xlim(left=0)
    axes.set_xlabel("wall time since the fit began (s)")
    axes.set_ylabel("validation accuracy")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    finish(figure, [axes])


def step_time(figure: Figure, shown: Shown) -> None:
    """A horizontal bar for each group, from the top down, and what it adds up to."""
    figure.set_figheight(1.8 + 0.5 * len(shown))
    axes = figure.subplots()
    rows, left = np.arange(len(shown)), np.zeros(len(shown))
    kinds = looks(len(PHASES))
    for phase, look in zip(PHASES, kinds, strict=True):
        widths = np.array([group.milliseconds[phase] for group, _ in shown])
        axes.barh(rows, widths, 0.7, left, color=look.colour, hatch=look.hatch, edgecolor="white", linewidth=0.5)
        left += widths
    for row, total in zip(rows, left, strict=True):
        axes.annotate(digits(total), (total, row), (4, 0), textcoords="offset points", va="center", fontsize=11)
    axes.set_yticks(rows, [plain(group.label) for group, _ in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * left.max())
    axes.set_xlabel("time of a step (ms, medians by phase)")
    pairs = zip(PHASES, kinds, strict=True)
    finish(figure, [axes], [Patch(facecolor=k.colour, hatch=k.hatch, edgecolor="white", label=p) for p, k in pairs])
    axes.grid(visible=False, axis="y")


def ratio_and_density(figure: Figure, shown: Shown) -> None:
    """Two panels over the same steps."""
    figure.set_figheight(7.0)
    above, below = figure.subplots(2, sharex=True)
    for group, look in shown:
        line(above, group.curve("step", group.ratio_name), look, f"{plain(group.label)} (N={group.world})", stairs=True)
        line(below, group.curve("step", SPARSITY).complement(), look, plain(group.label), stairs=True)
    log_scale(above, "y", PLAIN)
    log_scale(below, "y", PLAIN)
    above.set_ylabel("ratio, dense / sent (log)")
    below.set_ylabel("density, 1 - sparsity (log)")
    below.set_xlabel("optimizer step")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    finish(figure, [above, below])


def residual(figure: Figure, shown: Shown) -> None:
    """On a logarithmic axis."""
    axes = figure.subplots()
    for group, look in shown:
        line(axes, group.curve("step", RESIDUAL), look, plain(group.label))
    log_scale(axes, "y", PLAIN)
    axes.set_ylabel("residual / gradient (log)")
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    finish(figure, [axes])
