"""How the package says no: what was asked, what it got, what it allows."""

from __future__ import annotations

from typing import Any


def refusal(what: str, got: Any, allowed: str) -> ValueError:
    """The error for an option or a combination that can't be honoured.

    >>> str(refusal("DGC.sparsity", 1.5, "0 <= sparsity < 1"))
    'DGC.sparsity: got 1.5, allowed: 0 <= sparsity < 1'
    """
    return ValueError(f"{what}: got {got!r}, allowed: {allowed}")
