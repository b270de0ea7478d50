"""The error for files that are missing."""

from __future__ import annotations

from pathlib import Path

from lightning_gradcomp.errors import Refused

MEANWHILE = "Meanwhile, gradcomp recipe=digits needs none, and dry_run=true checks everything but the data"


class MissingData(Refused):
    """Files that are missing or can't be used."""


def missing(name: str | None, why: str, root: Path, option: str, how_to_get: str) -> MissingData:
    """The error for files that can't be used: why, where they were looked for, how to get them."""
    return MissingData(f"{name}: {why}. Looked in {root.resolve()} ({option}). {how_to_get}. {MEANWHILE}.")
