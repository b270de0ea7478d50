"""How much of a rank's own update its weights have while the average is under way. Needs no torch."""

from __future__ import annotations

from lightning_gradcomp.errors import is_number, refusal


def check_pending_share(share: float | None, *, stale_only: bool) -> None:
    """ValueError for what is neither None nor a number from 0 to 1, or where there is no such update."""
    if share is not None and not (is_number(share) and 0 <= share <= 1):
        raise refusal("pending_share", share, "None, or a number from 0 to 1")
    if share is not None and stale_only:
        raise refusal("pending_share with stale_only", share, "None: weights have averages alone")
