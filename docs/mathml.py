"""Formulas of the site: a ```math block as MathML, which browsers draw without a script. GitHub draws the same blocks.

mkdocs.yml names `fence`; the directory that holds docs/ has to be on Python's path: `python -m zensical build`.
"""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert


def fence(source: str, language: str, css_class: str, options: Any, md: Any, **others: Any) -> str:
    """What `pymdownx.superfences` puts in place of the block: `source` is LaTeX, `aligned` written as `align*`."""
    drawn = convert(source.replace("{aligned}", "{align*}"), display="block")
    drawn = re.sub(r'columnalign="(left|right)"', r'style="text-align: \1"', drawn)  # browsers know the style alone
    return f'<div class="math">{drawn}</div>'
