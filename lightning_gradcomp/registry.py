"""The table of compressors: name -> class. Lightning, Fabric, Hydra, the docs and the law tests all read it.

A compressor is a keyword-only dataclass of options decorated with `@register("name")`. Another package publishes its
own through an entry point in the group "lightning_gradcomp.compressors" that names the module which registers them.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TypeVar

from lightning_gradcomp.errors import refusal

_TABLE: dict[str, Entry] = {}
_LISTENERS: list[Callable[[Entry], None]] = []
C = TypeVar("C", bound=type)
GROUP = "lightning_gradcomp.compressors"
"""Entry points in this group name modules that register compressors."""


@dataclass(frozen=True)
class Entry:
    """One compressor: its Hydra name, its name in `Trainer(strategy=...)`, and its class."""

    name: str
    strategy: str
    cls: type

    @property
    def description(self) -> str:
        """The first line of the class's docstring."""
        return (self.cls.__doc__ or "").strip().splitlines()[0]


def register(name: str, *, strategy: str | None = None) -> Callable[[C], C]:
    """Class decorator that registers a compressor as `name`, and with the Trainer as `strategy` (default: `name`).

    Args:
        name: its name on the command line, in `GradientAverager` and in the strategies.
        strategy: its name in `Trainer(strategy=...)` and `Fabric(strategy=...)`.

    Raises:
        ValueError: if a name is taken.
    """

    def add(cls: C) -> C:
        taken = {
            word
            for known in _TABLE.values()
            if (known.cls.__module__, known.cls.__qualname__) != (cls.__module__, cls.__qualname__)
            for word in (known.name, known.strategy)
        }  # not by the same class: a notebook's cell may run twice
        for word in (name, strategy or name):
            if word in taken:
                raise refusal("@register", word, f"a name that is free; taken: {', '.join(sorted(taken))}")
        _TABLE[name] = Entry(name, strategy or name, cls)
        for listener in _LISTENERS:
            listener(_TABLE[name])
        return cls

    return add


def load_entry_points() -> None:
    """Import the modules that installed packages publish in `GROUP`. One that fails is named in a warning."""
    for point in entry_points(group=GROUP):
        try:
            importlib.import_module(point.module)
        except Exception as error:  # whatever one package raises, the others still load
            package = point.dist.name if point.dist else point.value
            what = f"{point.value}: {type(error).__name__}: {error}"
            warnings.warn(f"compressors of {package} are not available: importing {what}", stacklevel=2)


def entries() -> list[Entry]:
    """Every registered compressor, by name."""
    return [_TABLE[name] for name in sorted(_TABLE)]


def notify(listener: Callable[[Entry], None]) -> None:
    """Call `listener` for every registered compressor, and for each one registered later."""
    _LISTENERS.append(listener)
    for entry in entries():
        listener(entry)
