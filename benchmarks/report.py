"""What a benchmark ends with: a table on the screen, and under --out a JSON file with the conditions, and a figure."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from lightning_gradcomp.app.summary import processor

T_975 = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131]
T_975 += [2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042]
"""0.975 quantiles of Student's t distribution with 1 to 30 degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2)."""


def machine() -> str:
    """The hardware and the versions that figures were measured with."""
    cards = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{os.cpu_count()} cores of {processor()}, {cards}, torch {version('torch')}, {platform.system()}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in [head, ["---"] * len(head), *rows])


def half_width(differences: Sequence[float]) -> float:
    """Half of their 95 % interval by Student's t, of two differences or more; a little too wide beyond 31."""
    t = T_975[min(len(differences) - 1, len(T_975)) - 1]
    return t * stdev(differences) / len(differences) ** 0.5


def interval(differences: Sequence[float], digits: int = 2) -> str:
    """Mean ± half of its 95 % interval, of two differences or more."""
    rounded = round(mean(differences), digits) + 0.0  # no -0.00
    return f"{rounded:+.{digits}f} ± {half_width(differences):.{digits}f}"


def write(out: Path | None, name: str, results: Any, conditions: dict[str, Any], draw: Callable[[Any], None]) -> None:
    """`<out>/<name>.json` and `<out>/<name>.png`; nothing where there is no `out`.

    Args:
        draw: draws on the matplotlib axes that it is given.
    """
    if out is None:
        return
    from matplotlib.figure import Figure  # of the extra `recipes`; not needed for the table

    out.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine(), "conditions": {key: str(value) for key, value in conditions.items()}}
    (out / f"{name}.json").write_text(json.dumps({**content, "results": results}, indent=2) + "\n")
    figure = Figure(figsize=(7, 4), layout="constrained")
    draw(figure.subplots())
    figure.savefig(out / f"{name}.png", dpi=150)
    print(f"written: {out / name}.json, {out / name}.png")
