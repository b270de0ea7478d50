"""`gradcomp recipes`: the ready recipes as a table. Neither torch nor Lightning is needed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from lightning_gradcomp.app.compose import shipped

RESULT = re.compile(r"^# Result: (.+)[,;] (not measured by us|measured)", re.MULTILINE)
"""In which a recipe says what to expect, and whether we have measured it. Further lines of it begin with `#   `."""

GROUPS = ("model", "data", "compressor", "strategy")
HEAD = ("recipe", *GROUPS, "measured", "result")

HOW = "Run one: gradcomp recipe=NAME (dry_run=true needs no data). Any option: gradcomp --help"


def rows() -> list[tuple[str, ...]]:
    """A row for each recipe: its name, its choices, and what to expect of it."""
    return [row(path) for path in sorted(shipped("recipes").glob("*.yaml"))]


def row(path: Path) -> tuple[str, ...]:
    """Of one recipe."""
    text = path.read_text()
    content: dict[str, Any] = yaml.safe_load(text)
    chosen = {key.removeprefix("override /"): value for entry in content["defaults"] for key, value in entry.items()}
    found = RESULT.search(text.replace("\n#   ", " "))
    assert found, f"{path} doesn't say what its result is, and whether it was measured"
    measured = "yes" if found[2] == "measured" else "not by us"
    return path.stem, *(chosen.get(group, "ddp") for group in GROUPS), measured, found[1]


def table() -> str:
    """For the terminal."""
    lines = [HEAD, *rows()]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD) - 1)]
    shown = ["  ".join([*map(str.ljust, line, widths), line[-1]]) for line in lines]
    return "\n".join([*shown, "", HOW])
