"""The style of lines, bars and axes, which also differ in grey and for readers with colour blindness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from lightning_gradcomp.app.report.groups import Curve

DASHES = ("-", "--", "-.", ":")
MARKERS = "osD^vP*X<>hp"
HATCHES = ("", "//", "..", "xx")


@dataclass(frozen=True)
class Look:
    """The style of one line or one kind of bar."""

    colour: tuple[float, float, float, float]
    dashes: str
    marker: str
    hatch: str
    number: int


def looks(number: int) -> list[Look]:
    """`number` styles, from dark to light in even steps; the lightest is still visible on white."""
    viridis = matplotlib.colormaps["viridis"]
    return [
        Look(
            viridis(0.8 * i / max(number - 1, 1)),
            DASHES[i % len(DASHES)],
            MARKERS[i % len(MARKERS)],
            HATCHES[i % len(HATCHES)],
            i,
        )
        for i in range(number)
    ]


def plain(label: str) -> str:
    """`label` for matplotlib, which takes $ for mathematics, and leaves labels that begin with _ out of a legend."""
    return (" " * label.startswith("_") + label).replace("$", r"\$")


def line(axes: Axes, curve: Curve, look: Look, label: str, *, markers: bool = False, stairs: bool = False) -> None:
    """Draw a curve with its band; with `markers` at every point, else at a few.

    Args:
        stairs: a value holds until the next; else straight lines join them.
    """
    every = max(1, len(curve.x) // 8)
    spread = (look.number * every // 3 % every, every)  # markers of lines that coincide are at different points
    axes.plot(
        curve.x,
        curve.y,
        color=look.colour,
        linestyle=look.dashes,
        linewidth=2,
        marker=look.marker,
        markersize=6,
        markevery=None if markers else spread,
        drawstyle="steps-post" if stairs else "default",
        label=label,
    )
    step = "post" if stairs else None
    axes.fill_between(curve.x, curve.low, curve.high, color=look.colour, alpha=0.2, linewidth=0, step=step)


def log_scale(axes: Axes, which: str, words: FuncFormatter) -> None:
    """A logarithmic axis `which` ("x" or "y") with ticks at 1, 2 and 5, or at powers of ten where it spans many."""
    axis = getattr(axes, f"{which}axis")
    low, high = axis.get_data_interval()
    getattr(axes, f"set_{which}scale")("log")
    margin = 1.5 if high > 4 * low else 2.5  # so that there are two ticks at least
    getattr(axes, f"set_{which}lim")(low / margin, high * margin)
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(words)


def finish(figure: Figure, axes: Sequence[Axes], handles: Sequence[Any] | None = None) -> None:
    """Set grids, font sizes, and a legend under the figure."""
    for each in axes:
        each.grid(alpha=0.3)
        each.set_axisbelow(True)
        each.tick_params(labelsize=11)
        each.xaxis.label.set_fontsize(12)
        each.yaxis.label.set_fontsize(12)
        each.spines[["top", "right"]].set_visible(False)
    shown = handles or axes[0].get_legend_handles_labels()[0]
    widest = max(len(str(handle.get_label())) for handle in shown)
    columns = min(len(shown), max(1, 90 // (widest + 9)))
    figure.set_figheight(
        figure.get_figheight() + 0.24 * ((len(shown) - 1) // columns)
    )  # rows take nothing from the axes
    figure.legend(handles=shown, loc="outside lower center", ncols=columns, fontsize=11, handlelength=3.5)
