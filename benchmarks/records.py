"""CSV files whose lines are a dataclass of strings, numbers and, as empty cells, None."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

Record = TypeVar("Record")


def read(path: Path, cls: type[Record]) -> list[Record]:
    """All lines; none if there is no file."""
    if not path.exists():
        return []
    hints = get_type_hints(cls)
    with path.open(newline="") as file:
        lines = csv.DictReader(file)
        return [cls(**{name: _value(cell, hints[name]) for name, cell in line.items()}) for line in lines]


def _value(cell: str, hint: Any) -> Any:
    kinds = get_args(hint) or (hint,)  # of `int | None`, int comes first
    return None if not cell and type(None) in kinds else kinds[0](cell)


def write(path: Path, records: Iterable[Any]) -> None:
    """All lines, of one record or more."""
    lines = list(records)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(lines[0])], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, lines))
