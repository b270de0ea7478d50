"""Errors for options: what was asked, what it got, what is allowed."""

from __future__ import annotations

import math
from typing import Any


def is_number(value: Any) -> bool:
    """Whether `value` is a finite whole or floating-point number; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any) -> bool:
    """Whether `value` is a whole number; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


class Refused(ValueError):
    """What was asked for can't be done; the message says what is allowed."""


class MissingFile(Refused, FileNotFoundError):
    """A file that is not there."""


def refusal(what: str, got: Any, allowed: str) -> Refused:
    """The error for an option or a combination that can't be honoured.

    >>> str(refusal("DGC.sparsity", 1.5, "0 <= sparsity < 1"))
    'DGC.sparsity: got 1.5, allowed: 0 <= sparsity < 1'
    """
    return Refused(f"{what}: got {got!r}, allowed: {allowed}")
