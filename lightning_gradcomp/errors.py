"""Errors for options: which option, what it got, and what is allowed."""

from __future__ import annotations

import math
from typing import Any, TypeGuard


def is_number(value: Any) -> bool:
    """True if `value` is a finite int or float, but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any) -> TypeGuard[int]:
    """True if `value` is an int, but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_flag(what: str, value: Any) -> None:
    """Raises ValueError unless `value` is a bool: any text, also "no", would count as true."""
    if not isinstance(value, bool):
        raise refusal(what, value, "True or False")


def check_whole(what: str, value: Any, least: int) -> None:
    """Raises ValueError unless `value` is a whole number from `least`, and not a bool."""
    if not is_whole(value) or value < least:
        raise refusal(what, value, f"a whole number from {least}")


def check_share(what: str, value: Any) -> None:
    """Raises ValueError unless `value` is None or a number from 0 to 1."""
    if value is not None and not (is_number(value) and 0 <= value <= 1):
        raise refusal(what, value, "None, or a number from 0 to 1")


class Refused(ValueError):
    """The request can't be fulfilled; the message says what is allowed."""


class MissingFile(Refused, FileNotFoundError):
    """A missing file."""


def refusal(what: str, got: Any, allowed: str) -> Refused:
    """The error for an invalid option or combination of options.

    >>> str(refusal("DGC.sparsity", 1.5, "0 <= sparsity < 1"))
    'DGC.sparsity: got 1.5, allowed: 0 <= sparsity < 1'
    """
    return Refused(f"{what}: got {got!r}, allowed: {allowed}")


def help_at(section: str) -> str:
    """Where the documentation explains a message that says what is wrong, but not what to do."""
    return f"(see docs/help.md#{section})"
