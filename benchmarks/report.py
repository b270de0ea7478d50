"""What a benchmark ends with: a table on the screen, and under --out a JSON file with the conditions, and a figure."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lightning_gradcomp.app.env import processor


def machine() -> str:
    """The hardware and the versions that figures were measured with."""
    cards = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{os.cpu_count()} cores of {processor()}, {cards}, torch {version('torch')}, {platform.system()}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in [head, ["---"] * len(head), *rows])


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
