"""The drawings of the pages: boxes, arrows and a terminal. `python -m docs.pictures` writes them.

`python -m docs.diagrams` runs what the terminal shows, and records it in docs/data/terminal_*.txt (Linux, root).

Ten units are an inch, and all drawings are five inches wide: one unit is 8 pixels on a telephone's 400.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from docs.pictures import BLUE, GREEN, GREY, ORANGE, VIOLET, Picture

DATA = Path(__file__).with_name("data")
WIDTH = 50
SMALL = 8.5
"""Points, of notes; names have 10."""

Point = tuple[float, float]


class Box(NamedTuple):
    """A rectangle: its centre and its size."""

    x: float
    y: float
    width: float
    height: float

    def left(self, up: float = 0) -> Point:
        return self.x - self.width / 2, self.y + up

    def right(self, up: float = 0) -> Point:
        return self.x + self.width / 2, self.y + up

    def top(self, x: float | None = None) -> Point:
        return (self.x if x is None else x), self.y + self.height / 2

    def bottom(self, x: float | None = None) -> Point:
        return (self.x if x is None else x), self.y - self.height / 2


def canvas(axes: Axes, height: float) -> None:
    """Units for a drawing, without axes."""
    axes.set(xlim=(0, WIDTH), ylim=(0, height))
    axes.axis("off")


def box(axes: Axes, place: Box, text: str, color: str = GREY, **words: Any) -> Box:
    """A box with round corners and words in it."""
    corner = (place.x - place.width / 2, place.y - place.height / 2)
    style = "round,pad=0,rounding_size=0.8"
    for face, alpha in ((color, 0.12), ("none", 1)):
        edge = "none" if alpha < 1 else color
        axes.add_patch(
            FancyBboxPatch(corner, place.width, place.height, style, facecolor=face, edgecolor=edge, alpha=alpha)
        )
    axes.text(place.x, place.y, text, ha="center", va="center", color=color, **words)
    return place


def block(axes: Axes, x: float, y: float, width: float, height: float, color: str, **style: Any) -> None:
    """A filled rectangle; (x, y) is its lower left corner."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="none", **style))


def arrow(axes: Axes, *points: Point, color: str = GREY, style: str = "-|>", width: float = 1.2) -> None:
    """From the first point to the last, around the corners between them."""
    for (x, y), (to_x, to_y) in list(pairwise(points))[:-1]:
        axes.plot([x, to_x], [y, to_y], color=color, linewidth=width, solid_capstyle="round")
    properties = {"arrowstyle": style, "color": color, "linewidth": width, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", points[-1], points[-2], arrowprops={**properties, "mutation_scale": 10})


def step_of_dgc(axes: Axes) -> None:
    """What happens on a rank: gradient, momentum, velocity; the largest are sent, the rest stays."""
    canvas(axes, 29)
    gradient = box(axes, Box(6, 25.5, 10, 5), "gradient")
    momentum = box(axes, Box(20.5, 25.5, 12, 5), "momentum u")
    velocity = box(axes, Box(40, 25.5, 19, 5), "velocity v")
    residual = box(axes, Box(33, 14.5, 12, 6), "the rest:\nthe residual", ORANGE)
    sent = box(axes, Box(45.25, 14.5, 8.5, 6), "largest\n0.4 %", BLUE)
    mean = box(axes, Box(43, 3.5, 13, 6), "mean over\nall ranks", GREEN)
    weights = box(axes, Box(20.5, 3.5, 12, 6), "weights", GREEN)
    arrow(axes, gradient.right(), momentum.left())
    arrow(axes, momentum.right(), velocity.left())
    arrow(axes, velocity.bottom(31.5), residual.top(31.5), color=ORANGE)
    arrow(axes, residual.top(36), velocity.bottom(36), color=ORANGE)
    axes.text(36.6, 20.2, "next step", color=ORANGE, va="center", fontsize=SMALL)
    arrow(axes, velocity.bottom(45.25), sent.top(), color=BLUE)
    arrow(axes, sent.bottom(), mean.top(45.25), color=BLUE)
    axes.text(44.6, 9, "2 bits a value, and its place", color=BLUE, va="center", ha="right", fontsize=SMALL)
    arrow(axes, mean.left(), weights.right(), color=GREEN)
    axes.text(31.5, 4.2, "optimizer", color=GREEN, ha="center", va="bottom", fontsize=SMALL)
    arrow(axes, weights.left(), (6, 3.5), gradient.bottom(), color=GREEN)
    axes.text(6.8, 14.5, "forward and\nbackward", color=GREEN, va="center", fontsize=SMALL)


STEPS = (
    ("backward", "a gradient of this rank's samples", GREY),
    ("collect", "in one flat buffer, without loss scale", GREY),
    ("compensate", "add the residual; DGC: momentum", ORANGE),
    ("encode", "a payload of bytes", BLUE),
    ("exchange", "one message to and from\nall other ranks", BLUE),
    ("decode and add", "in rank order: the same bits\non every rank", BLUE),
    ("all finite?", "if not: NaN on every rank,\nand no state changes", GREY),
    ("optimizer step", "applies p.grad", GREEN),
    ("commit", "what was sent leaves the residual", ORANGE),
)


def step(axes: Axes) -> None:
    """One compressed step on a rank, from top to bottom."""
    height, pitch = 46.0, 5.1
    canvas(axes, height)
    places = []
    for number, (name, note, color) in enumerate(STEPS):
        y = height - 2.2 - pitch * number
        places.append(box(axes, Box(15, y, 15, 3.6), name, color))
        axes.text(24.2, y, note, va="center", fontsize=SMALL, linespacing=1.1)
    for before, after in pairwise(places):
        arrow(axes, before.bottom(), after.top())
    compensate, commit = places[2], places[-1]
    arrow(axes, commit.left(), (3.5, commit.y), (3.5, compensate.y), compensate.left(), color=ORANGE)
    middle = (commit.y + compensate.y) / 2
    words = {"ha": "center", "va": "center", "rotation": 90, "color": ORANGE, "fontsize": SMALL}
    axes.text(2.2, middle, "residual, for the next step", **words)


RANKS = (BLUE, ORANGE, GREEN, VIOLET)
"""A colour a rank."""
PITCH, SIDE = 5.6, 4.0
"""Of the ranks of a topology, and the length of a payload."""
ROWS = (21.0, 13.8, 6.6)
"""Where the blocks of a topology are: before, between two rounds, after."""


def _center(rank: int) -> float:
    return 4.2 + PITCH * rank


class Panel:
    """A quarter of the picture of topologies, or a half: where its lower left corner is."""

    def __init__(self, axes: Axes, left: float, low: float) -> None:
        self.axes, self.left, self.low = axes, left, low

    def title(self, name: str, note: str) -> None:
        self.axes.text(self.left + 12.5, self.low + 26.4, name, ha="center", va="center", weight="bold")
        self.numbers()
        self.axes.text(self.left + 12.5, self.low + 2.4, note, ha="center", va="center", fontsize=SMALL)

    def numbers(self) -> None:
        """Of the ranks, above their blocks."""
        for rank in range(4):
            x, y = self.left + _center(rank), self.low + ROWS[0] + 3.2
            self.axes.text(x, y, f"{rank}", ha="center", va="center", fontsize=SMALL)

    def blocks(self, rank: int, row: int, colors: Sequence[str], *, height: float = 2.4, share: float = 1.0) -> None:
        """Blocks of a rank, side by side: `share` of a payload's length in all."""
        width = SIDE * share / len(colors)
        x, y = self.left + _center(rank) - SIDE * share / 2, self.low + ROWS[row] - height / 2
        for number, color in enumerate(colors):
            block(self.axes, x + width * number, y, width - 0.15, height, color)

    def line(self, rank: int, to: int, rows: tuple[int, int], color: str, width: float) -> None:
        """From the blocks of a rank in one row to those of another in a lower one."""
        xs = [self.left + _center(rank), self.left + _center(to)]
        ys = [self.low + ROWS[rows[0]] - 1.6, self.low + ROWS[rows[1]] + 1.6]
        self.axes.plot(xs, ys, color=color, linewidth=width, alpha=0.8, solid_capstyle="round")


def topologies(axes: Axes) -> None:
    """What each of four ranks has before and after a round, and what travels: the wider a line, the more bytes."""
    canvas(axes, 56)
    _all_gather(Panel(axes, 0, 28.5))
    _by_shards(
        Panel(axes, 25, 28.5), "two_phase", "round 1: parts to their owners\nround 2: compressed means to all", 2.4, 0.8
    )
    _by_shards(Panel(axes, 0, -0.5), "server", "round 1: parts to their owners\nround 2: dense means to all", 3.2, 3.5)
    _dense_inside(Panel(axes, 25, -0.5))


def _all_gather(panel: Panel) -> None:
    panel.title("all_gather", "one round: whole payloads\nto all ranks")
    for rank, color in enumerate(RANKS):
        panel.blocks(rank, 0, [color])
        for to in range(4):
            panel.line(rank, to, (0, 2), color, 2.4)
        panel.blocks(rank, 2, RANKS)


def _by_shards(panel: Panel, name: str, note: str, height: float, width: float) -> None:
    panel.title(name, note)
    for rank, color in enumerate(RANKS):
        panel.blocks(rank, 0, [color] * 4)
        for to in range(4):
            panel.line(rank, to, (0, 1), color, 0.8)
            panel.line(rank, to, (1, 2), GREY, width)
        panel.blocks(rank, 1, RANKS, share=0.6)
        panel.blocks(rank, 2, [GREY] * 4, height=height)


def _dense_inside(panel: Panel) -> None:
    panel.title('inside="dense"', "dense in a node, then one\npayload to the other node")
    for node, color in enumerate(RANKS[:2]):
        ranks = (2 * node, 2 * node + 1)
        middle = panel.left + sum(map(_center, ranks)) / 2
        box(panel.axes, Box(middle, panel.low + ROWS[0], 10.6, 4.4), "")
        for rank in ranks:
            panel.blocks(rank, 0, [GREY], height=3.4)
            for to in ranks:
                panel.line(rank, to, (0, 1), GREY, 3.5)
            panel.blocks(rank, 1, [color], share=0.5)
            panel.line(rank, rank, (1, 2), color, 1.2)
            panel.line(rank, (rank + 2) % 4, (1, 2), color, 1.2)
            panel.blocks(rank, 2, RANKS[:2])


def nodes(axes: Axes) -> None:
    """Four nodes of eight GPUs: whole replicas on all of them, or one on each node."""
    canvas(axes, 43)
    halves = (
        (
            'inside="dense"',
            "GPUs hold whole models;\na node averages densely",
            "a GPU sends an eighth of\nits node's payload",
        ),
        (
            "CompressedHSDPStrategy",
            "GPUs hold shards; FSDP2\ninside a node",
            "a GPU sends the payload\nof its own shard",
        ),
    )
    for number, (title, inside, between) in enumerate(halves):
        left = 25.5 * number
        axes.text(left + 12.2, 41.7, title, ha="center", va="center", weight="bold")
        axes.text(left + 12.2, 38.4, inside, ha="center", va="center", fontsize=SMALL)
        for node in range(4):
            y = 34 - 8.4 * node
            box(axes, Box(left + 12.2, y, 23.4, 4.6), "")
            axes.plot([left + 2.6, left + 21.8], [y, y], color=GREY, linewidth=4, alpha=0.6)
            for gpu in range(8):
                x = left + 2.6 + 2.74 * gpu
                if node < 3:
                    arrow(axes, (x, y - 2.3), (x, y - 6.1), color=BLUE, style="<|-|>", width=0.8)
                block(axes, x - 1, y - 1.6, 2, 3.2, GREY, alpha=0.35)
                part = (0.4 * gpu, 0.4) if number else (0, 3.2)
                block(axes, x - 1, y - 1.6 + part[0], 2, part[1], GREEN)
        axes.text(left + 12.2, 3.4, between, ha="center", va="center", fontsize=SMALL, color=BLUE)


BEGINS, COMPUTES, EXCHANGES = 6.5, 4.0, 1.3
"""Of the timelines of a fault: where the first step begins, and lengths."""
DEATH, SEEN, ENDED = 14.6, 17.2, 1.6
"""When rank 2 fails, when the others need it, and how long they take to end."""


def rank_dies(axes: Axes) -> None:
    """Four ranks, one of which dies or hangs: what the others see, and when they end."""
    canvas(axes, 41)
    _fault(axes, 39.6, 22.5, "Rank 2 dies: its connections break", "all end within seconds")
    _fault(axes, 20.6, 32.5, "Rank 2 hangs: nothing arrives", "all end within\ntimeout + 5 s")
    axes.plot([DEATH + 1.2], [39.6 - 9.8], "x", color=GREY, markersize=8, markeredgewidth=2)
    axes.plot([DEATH, 41], [20.6 - 9.8, 20.6 - 9.8], ":", color=GREY, linewidth=2)
    arrow(axes, (SEEN, 5.4), (32.5, 5.4), style="<|-|>", width=0.8)
    axes.text((SEEN + 32.5) / 2, 4, "timeout, 5 minutes by default", ha="center", va="center", fontsize=SMALL)
    x = BEGINS
    for color, alpha, name in (
        (BLUE, 1, "computes"),
        (ORANGE, 1, "exchanges"),
        (ORANGE, 0.45, "waits"),
        (GREY, 1, "error"),
    ):
        block(axes, x, 0.6, 1.6, 1.4, color, alpha=alpha)
        axes.text(x + 2.1, 1.25, name, va="center", fontsize=SMALL)
        x += 5 + 0.72 * len(name)


def _fault(axes: Axes, top: float, error: float, title: str, outcome: str) -> None:
    """Four rows below a title: `error` is when three ranks raise theirs."""
    axes.text(0.5, top, title, va="center", weight="bold")
    second = BEGINS + COMPUTES + EXCHANGES + 0.4
    for rank in range(4):
        y = top - 3.4 - 3.2 * rank
        axes.text(0.5, y, f"rank {rank}", va="center")
        block(axes, BEGINS, y - 1, COMPUTES, 2, BLUE)
        block(axes, BEGINS + COMPUTES + 0.2, y - 1, EXCHANGES, 2, ORANGE)
        if rank == 2:
            block(axes, second, y - 1, DEATH - second, 2, BLUE)
            continue
        block(axes, second, y - 1, SEEN - second - 0.2, 2, BLUE)
        block(axes, SEEN, y - 1, error - SEEN, 2, ORANGE, alpha=0.45)
        block(axes, error, y - 1, ENDED, 2, GREY)
    x = error + ENDED + 1
    axes.text(x, top - 3.4, "ExchangeFailed", va="center")
    axes.text(x, top - 6.6, outcome, va="center", fontsize=SMALL)


PANES = ("ddp", "dgc")
COMMAND = "python -m benchmarks.link --nodes 2 --rate-mbit 1000 -- python docs/examples/two_machines.py"
OURS = re.compile(r"DGC: |Steps are |\d+ ms a step|node \d sent ")
"""How the lines begin that are neither Lightning's nor torch's."""
COLUMNS = 66
"""Letters in a line of the terminal."""
LINE = 1.55
"""Height of a line."""
SCREEN, LETTERS, PROMPT, RESULT = "#1f2328", "#d1d7e0", "#6cb6ff", "#8ddb8c"


def record(name: str) -> None:
    """Run the script with a strategy between two emulated nodes, and keep what it says."""
    command = f"{COMMAND} {name}"
    done = subprocess.run(shlex.split(command), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
    lines = [f"$ {command}", *filter(OURS.match, done.stdout.splitlines())]
    (DATA / f"terminal_{name}.txt").write_text("".join(f"{line}\n" for line in lines))


def screen(name: str) -> Iterator[tuple[str, str]]:
    """Lines of a recorded run and their colours: the command first."""
    for number, line in enumerate((DATA / f"terminal_{name}.txt").read_text().splitlines()):
        for part in textwrap.wrap(line, COLUMNS, break_on_hyphens=False):
            yield part, RESULT if part.endswith("ms a step") else LETTERS if number else PROMPT


def terminal(axes: Axes) -> None:
    """Two recorded runs of docs/examples/two_machines.py."""
    panes = [list(screen(name)) for name in PANES]
    height = sum(LINE * len(lines) + 3 for lines in panes)
    canvas(axes, height)
    top = height
    for lines in panes:
        tall = LINE * len(lines) + 2
        style = "round,pad=0,rounding_size=0.8"
        axes.add_patch(FancyBboxPatch((0.3, top - tall), 49.4, tall, style, facecolor=SCREEN, edgecolor=GREY))
        for number, (line, color) in enumerate(lines):
            words = {"family": "monospace", "fontsize": 7.6, "va": "center", "color": color}
            axes.text(1.5, top - 1.8 - LINE * number, line, **words)
        top -= tall + 1


PICTURES: dict[str, Picture] = {
    "step_of_dgc": (step_of_dgc, (5, 2.9)),
    "step": (step, (5, 4.6)),
    "topologies": (topologies, (5, 5.6)),
    "nodes": (nodes, (5, 4.3)),
    "rank_dies": (rank_dies, (5, 4.1)),
    "terminal": (terminal, (5, 2.9)),
}


if __name__ == "__main__":
    for pane in PANES:
        record(pane)
