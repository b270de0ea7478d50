"""The figures of a report: what each shows, how to read it, and why a group may be missing in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from lightning_gradcomp.app.report import plots
from lightning_gradcomp.app.report.groups import Group
from lightning_gradcomp.app.report.runs import RESIDUAL, SENT, SPARSITY, TIME, VALIDATED
from lightning_gradcomp.app.report.style import looks

SIZE = (8.0, 5.0)
"""Inches."""


@dataclass(frozen=True)
class Kind:
    """A figure that a report has, if there is something to show.

    Args:
        name: of its files.
        title: above it.
        reading: one sentence on how to read it.
        fill: draws the groups that are not missing.
        lacks: why a group is missing; None where it is not.
    """

    name: str
    title: str
    reading: str
    fill: Callable[[Figure, plots.Shown], None]
    lacks: Callable[[Group], str | None]


@dataclass(frozen=True)
class Drawn:
    """A figure as drawn: `canvas` is None where all groups are missing. `missing`: labels, and why."""

    kind: Kind
    canvas: Figure | None
    missing: list[tuple[str, str]]


def draw(groups: list[Group]) -> list[Drawn]:
    """All figures; a group has the same style in each of them."""
    styles = list(zip(groups, looks(len(groups)), strict=True))
    drawn = []
    for kind in KINDS:
        missing = [(group.label, why) for group in groups if (why := kind.lacks(group))]
        shown = [(group, look) for group, look in styles if not kind.lacks(group)]
        canvas = Figure(figsize=SIZE, layout="constrained") if shown else None
        if canvas:
            kind.fill(canvas, shown)
        drawn.append(Drawn(kind, canvas, missing))
    return drawn


def _no_bytes(group: Group) -> str | None:
    if group.world == 1:
        return "sends nothing: N=1"
    return _not_logged(group, SENT, VALIDATED)


def _no_time(group: Group) -> str | None:
    return _not_logged(group, TIME, VALIDATED)


def _no_phases(group: Group) -> str | None:
    return None if sum(group.milliseconds.values()) else "no step was logged"


def _no_ratio(group: Group) -> str | None:
    return _not_logged(group, SPARSITY, group.ratio_name)


def _no_residual(group: Group) -> str | None:
    if group.runs[0].delayed:
        return "residuals of delayed averages are not logged"
    if _not_logged(group, RESIDUAL) is None:
        return None
    if max(run.highest(group.ratio_name) for run in group.runs) > 1:
        return "has no residual"
    return "no compressed step was logged"


def _not_logged(group: Group, *names: str) -> str | None:
    there = all(len(run.at("step", *names)[0]) for run in group.runs)
    return None if there else f"metrics.csv has no {' with '.join(names)}"


KINDS = (
    Kind(
        "accuracy_over_bytes",
        "Validation accuracy over bytes sent",
        "Each marker is a validation; farther left is less traffic for the same accuracy, counted in bytes of "
        "gradients that left one rank since the fit began, warm-up included.",
        plots.accuracy_over_bytes,
        _no_bytes,
    ),
    Kind(
        "accuracy_over_time",
        "Validation accuracy over wall time",
        "Each marker is a validation; farther left is sooner, on the machine and over the link of this report, with "
        "the time that validations took.",
        plots.accuracy_over_time,
        _no_time,
    ),
    Kind(
        "step_time",
        "Time of a step, by phase",
        "Each part is that phase's own median over the steps (and the mean over runs), so a bar is about as long as a "
        "median step; exchange is what the step waited for.",
        plots.step_time,
        _no_phases,
    ),
    Kind(
        "ratio_and_density",
        "Compression ratio and density over steps",
        "Above, how many times more bytes a dense ring all-reduce between N ranks would have sent in the step (with "
        "delayed averages: in all steps so far); below, the share of elements that is sent, in which a warm-up is a "
        "staircase and methods that send every element in fewer bits stay at 1.",
        plots.ratio_and_density,
        _no_ratio,
    ),
    Kind(
        "residual",
        "Residual, relative to the gradient",
        "The L2 norm of one rank's residual over that of its gradient in the same step. A level line is normal; one "
        "that rises until the end shows that too little is sent, or that gradients shrink. DGC's is higher, since its "
        "residual is a sum of velocities.",
        plots.residual,
        _no_residual,
    ),
)
