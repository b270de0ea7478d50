"""One table of compressors: name -> class. Lightning, Fabric, Hydra, the docs and the law tests all read it.

A compressor is a keyword-only dataclass of options with `@register("name")` above it; nothing else has to know of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_gradcomp.errors import refusal

_TABLE: dict[str, Entry] = {}
_LISTENERS: list[Callable[[Entry], None]] = []
C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Entry:
    """One compressor: its Hydra name, the name `Trainer(strategy=...)` knows it by, its class."""

    name: str
    strategy: str
    cls: type

    @property
    def description(self) -> str:
        """The first line of the class's docstring."""
        return (self.cls.__doc__ or "").strip().splitlines()[0]


def register(name: str, *, strategy: str | None = None) -> Callable[[C], C]:
    """Class decorator that makes a compressor known as `name`, and to the Trainer as `strategy` (default: `name`).

    Args:
        name: the word on the command line, and for `GradientAverager` and the strategies.
        strategy: the word for `Trainer(strategy=...)` and `Fabric(strategy=...)`.

    Raises:
        ValueError: a name that is taken.
    """

    def add(cls: C) -> C:
        if name in _TABLE:
            raise refusal("@register", name, f"a name that is free; taken: {', '.join(sorted(_TABLE))}")
        _TABLE[name] = Entry(name, strategy or name, cls)
        for listener in _LISTENERS:
            listener(_TABLE[name])
        return cls

    return add


def entries() -> list[Entry]:
    """Every registered compressor, by name."""
    return [_TABLE[name] for name in sorted(_TABLE)]


def tell(listener: Callable[[Entry], None]) -> None:
    """Call `listener` for every compressor that is registered, now or later."""
    _LISTENERS.append(listener)
    for entry in entries():
        listener(entry)


def build(compressor: Any) -> Any:
    """A compressor from its name or its Trainer name (with default options), or the instance that was given.

    Raises:
        ValueError: an unknown name, or an object that is not an instance of a registered class.
    """
    if isinstance(compressor, str):
        for entry in _TABLE.values():
            if compressor in (entry.name, entry.strategy):
                return entry.cls()
        raise refusal("compressor", compressor, ", ".join(sorted(_TABLE)))
    if not any(isinstance(compressor, entry.cls) for entry in _TABLE.values()):
        names = ", ".join(sorted(_TABLE))
        raise refusal("compressor", compressor, f"an instance of a registered class, or one of {names}")
    return compressor
