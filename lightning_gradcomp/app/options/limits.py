"""What an option may be, as one line each."""

from __future__ import annotations

from lightning_gradcomp.errors import refusal


def one_of(what: str, got: object, allowed: tuple[str, ...]) -> None:
    """ValueError unless `got` is among `allowed`."""
    if got not in allowed:
        raise refusal(what, got, ", ".join(allowed))


def at_least(what: str, got: float, least: float) -> None:
    """ValueError if `got` is below `least`."""
    if got < least:
        raise refusal(what, got, f"{least} or more")


def share(what: str, got: float) -> None:
    """ValueError unless `got` lies in [0, 1]."""
    if not 0 <= got <= 1:
        raise refusal(what, got, "0 to 1")
