"""A file that torch.save wrote, or a sentence that says what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_gradcomp.errors import refusal


def read(load: Callable[..., Any], path: Any, what: str, key: str, allowed: str, **options: Any) -> dict[str, Any]:
    """What `load(path, **options)` returns: a dict that has `key`.

    Raises:
        ValueError: it can't be read to the end, or holds something else. `what` and `allowed` go into the message.
    """
    try:
        content = load(path, **options)
    except OSError as error:
        raise refusal(what, f"{path}: {error}", allowed) from error
    except Exception as error:  # torch.load has an error of its own for each way in which a file can be broken
        raise refusal(what, f"{path}, which can't be read ({_in_short(error)})", allowed) from error
    if not isinstance(content, dict) or key not in content:
        raise refusal(what, f"{path}, which holds something else", allowed)
    return content


def _in_short(error: Exception) -> str:
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return first.partition(". ")[0]
