"""Formatting of numbers for output."""

from __future__ import annotations


def human(size: float) -> str:
    """A number of bytes with its unit.

    >>> human(999), human(44_700_000)
    ('999 B', '44.7 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def digits(number: float) -> str:
    """A number with three significant digits, or all those before the decimal point.

    >>> digits(2135.4), digits(8.5432)
    ('2,135', '8.54')
    """
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"
