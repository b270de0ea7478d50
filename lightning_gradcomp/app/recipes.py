"""`gradcomp recipes`: the recipes as a table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from lightning_gradcomp.app.compose import chosen_by, shipped

RESULT = re.compile(r"^# Result: (.+)[,;] (not measured by us|measured)", re.MULTILINE)
"""The comment with a recipe's expected result, and whether it was measured. Its further lines begin with `#   `."""

GROUPS = ("model", "data", "compressor", "strategy")
HEAD = ("recipe", *GROUPS, "measured", "result")

HOW = "Run one: gradcomp recipe=NAME (dry_run=true needs no data). Any option: gradcomp --help"


def rows() -> list[tuple[str, ...]]:
    """A row for each recipe: its name, its choices, whether it was measured, and its expected result."""
    return [row(path) for path in sorted(shipped("recipes").glob("*.yaml"))]


def row(path: Path) -> tuple[str, ...]:
    """The row of one recipe."""
    text = path.read_text()
    content: dict[str, Any] = yaml.safe_load(text)
    chosen = chosen_by(content)
    found = RESULT.search(text.replace("\n#   ", " "))
    assert found, f"{path} has no line with its result, and whether it was measured"
    measured = "yes" if found[2] == "measured" else "not by us"
    return path.stem, *(chosen.get(group, "ddp") for group in GROUPS), measured, found[1]


def table() -> str:
    """The table, for the terminal."""
    lines = [HEAD, *rows()]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD) - 1)]
    shown = ["  ".join([*map(str.ljust, line, widths), line[-1]]) for line in lines]
    return "\n".join([*shown, "", HOW])
