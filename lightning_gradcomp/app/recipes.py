"""`gradcomp recipes`: lists recipes/."""

from __future__ import annotations

from lightning_gradcomp.app.compose import shipped
from lightning_gradcomp.errors import refusal


def main(words: list[str]) -> int:
    """Print the name and the first sentence of every recipe."""
    if words:
        raise refusal("gradcomp recipes", " ".join(words), "no further words")
    for path in sorted(shipped("recipes").glob("*.yaml")):
        print(f"{path.stem:<24}{head(path.read_text())}")
    return 0


def head(text: str) -> str:
    """The first sentence of a recipe, on one line."""
    lines = [line.removeprefix("# ") for line in text.splitlines()[1:] if line.startswith("#")]
    return " ".join(lines).partition(". ")[0].partition(" Result:")[0]
