"""What an option may be, as one line each. Every function raises ValueError with what, got and allowed."""

from __future__ import annotations

from math import inf, isfinite
from typing import Any

from lightning_gradcomp.errors import refusal

LARGEST = 2**31 - 1
"""Largest whole number of an option, unless a smaller one is given."""


def one_of(what: str, got: object, allowed: tuple[str, ...]) -> None:
    """`got` has to be among `allowed`."""
    if got not in allowed:
        raise refusal(what, got, ", ".join(allowed))


def whole(what: str, got: Any, least: int, most: int = LARGEST, also: str = "") -> None:
    """`got` has to be an integer (not a bool) from `least` to `most`. `also`: what else the option may be, in words."""
    if type(got) is not int or not least <= got <= most:
        raise refusal(what, got, f"{also}a whole number from {least} to {most}")


def number(what: str, got: Any, least: float = -inf, most: float = inf) -> None:
    """`got` has to be a finite number (not a bool) from `least` to `most`."""
    if type(got) not in (int, float) or not (isfinite(got) and least <= got <= most):
        raise refusal(what, got, f"{least:g} or more, and finite" if most == inf else f"{least:g} to {most:g}")
