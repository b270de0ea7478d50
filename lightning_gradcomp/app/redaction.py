"""Secrets are replaced by *** wherever a run is written or printed: in URIs, and in options that hold a key."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"
SECRET = r"(?:api_?key|token|password|passwd|secret|credential)"

_USER = re.compile(r"(\w://)[^/\s'\"]+@")
_QUERY = re.compile(rf"([?&;][\w.-]*{SECRET}[\w.-]*=)[^&;\s'\"]+", re.IGNORECASE)
_OPTION = re.compile(
    rf"({SECRET}\w*(?:: got |=|: ))(?!(?:null|none|true|false)\b)('[^']*'|\"[^\"]*\"|[^\s,}}]+)",
    re.IGNORECASE,
)


def redacted(text: str) -> str:
    """`text` without user names, passwords and keys.

    >>> redacted("https://user:password@host/path?token=abc"), redacted("logger.api_key=abc")
    ('https://***@host/path?token=***', 'logger.api_key=***')
    """
    text = _USER.sub(rf"\1{HIDDEN}@", text)
    text = _QUERY.sub(rf"\1{HIDDEN}", text)
    return _OPTION.sub(rf"\1{HIDDEN}", text)


def redacted_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of one group, without secrets in their values, and without those whose name says that they are one."""
    shown = {name: redacted(value) if isinstance(value, str) else value for name, value in options.items()}
    return {name: HIDDEN if re.search(SECRET, name, re.IGNORECASE) else value for name, value in shown.items()}
