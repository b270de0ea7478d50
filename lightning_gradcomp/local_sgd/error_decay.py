"""SparseLoCo's option: the factor by which a rank multiplies, once a round, what compressed rounds have left out."""

from __future__ import annotations

from lightning_gradcomp.errors import is_number, refusal


def check_error_decay(error_decay: float | None) -> None:
    """ValueError for what is neither None nor a number from 0 to 1."""
    if error_decay is not None and not (is_number(error_decay) and 0 <= error_decay <= 1):
        raise refusal("error_decay", error_decay, "None, or a number from 0 to 1")
