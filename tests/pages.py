"""The pages that people read, and the blocks of code in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
}
FENCE = re.compile(r"^```(.*)$")
INLINE = re.compile(r"`([^`\n]+)`")


def blocks(page: str) -> list[tuple[str, int, str]]:
    """(kind, number of its first line, text) of every fenced block of a page."""
    found, kind, begin, lines = [], None, 0, []
    for number, line in enumerate(PAGES[page].read_text().splitlines(), 1):
        fence = FENCE.match(line)
        if fence and kind is None:
            kind, begin, lines = fence[1], number + 1, []
        elif fence:
            assert not fence[1], f"{page}:{number}: a block inside a block"
            found.append((kind, begin, "\n".join(lines) + "\n"))
            kind = None
        elif kind is not None:
            lines.append(line)
    assert kind is None, f"{page}:{begin}: the block has no end"
    return found


def prose(page: str) -> str:
    """A page without its fenced blocks, line by line where it was."""
    inside, kept = False, []
    for line in PAGES[page].read_text().splitlines():
        fence = FENCE.match(line)
        kept.append("" if inside or fence else line)
        inside ^= bool(fence)
    return "\n".join(kept)
