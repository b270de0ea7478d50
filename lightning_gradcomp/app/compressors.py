"""`gradcomp compressors [NAME]`: every compressor that is installed, or the options of one."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields

from lightning_gradcomp.errors import refusal
from lightning_gradcomp.registry import entries

HEAD = ("compressor=", "strategy=", "sends")
HOW = "Options of one: gradcomp compressors NAME"


def table() -> str:
    """The table, for the terminal: those of installed packages too."""
    lines = [HEAD, *((entry.name, entry.strategy, entry.description) for entry in entries())]
    widths = [max(len(line[column]) for line in lines) for column in range(2)]
    return "\n".join([*(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in lines), "", HOW])


def options_of(name: str) -> str:
    """The docstring of compressor `name`, and its options with their defaults, as the command line has them.

    Raises:
        ValueError: there is no such compressor.
    """
    found = next((entry.cls for entry in entries() if name in (entry.name, entry.strategy)), None)
    if found is None:
        raise refusal("compressor", name, ", ".join(entry.name for entry in entries()))
    defaults = [
        (field.name, field.default_factory() if field.default is MISSING else field.default)  # pyrefly: ignore
        for field in fields(found)
    ]
    options = [f"  compressor.{option}={_written(default)}" for option, default in defaults]
    listed = ["On the command line, with the defaults:", *options] if options else ["It has no options."]
    return "\n".join([inspect.getdoc(found) or "", "", *listed])


def _written(value: object) -> str:
    """As Hydra writes it."""
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
