"""Compares options with the types that a class's annotations allow, for errors before a run starts.

Written here because no dependency of the package does it.
"""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lightning_gradcomp.errors import is_whole

WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
"""Types of values in a config, in words."""


def misfits(target: Callable[..., Any], options: Mapping[Any, Any]) -> Iterator[tuple[str, Any, str]]:
    """(name, value, what is allowed) of every option whose value is not of the annotated type.

    Judges only plain values, as in a YAML file: text, numbers, lists and null. Without an annotation, all values fit.
    """
    function = target.__init__ if inspect.isclass(target) else target
    try:
        hints, parameters = get_type_hints(function), inspect.signature(function).parameters
    except (NameError, TypeError, ValueError):  # types that are imported for type checkers only; functions in C
        return
    for name, value in options.items():
        known = name in hints and name in parameters
        if known and value is not parameters[name].default and not fits(value, hints[name]):
            yield name, value, " or ".join(dict.fromkeys(_words(hints[name])))


def fits(value: Any, hint: Any) -> bool:
    """False if a plain `value` is certainly not of the type `hint`."""
    if not isinstance(value, (str, bool, int, float, list, tuple, type(None))):
        return True
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in arguments)
    if origin is Literal:
        return any(type(value) is type(each) for each in arguments)  # which of them: the class says it best
    kind = origin or hint
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return is_whole(value)
    if kind in (Any, object) or not inspect.isclass(kind):
        return True
    if isinstance(value, (list, tuple)):
        if kind is tuple and arguments and ... not in arguments:
            return len(value) == len(arguments) and all(map(fits, value, arguments))
        return _is_list(kind) and all(fits(one, each) for one in value for each in arguments if each is not ...)
    return isinstance(value, kind) or (isinstance(value, str) and issubclass(kind, os.PathLike))


def _is_list(kind: type) -> bool:
    is_container = kind.__module__ in ("builtins", "collections.abc")  # a Tensor is iterable too
    return is_container and issubclass(kind, Iterable) and not issubclass(kind, (str, Mapping))


def _words(hint: Any) -> Iterator[str]:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        for each in get_args(hint):
            yield from _words(each)
    elif origin is Literal:
        yield from map(str, get_args(hint))
    else:
        kind, arguments = origin or hint, get_args(hint)
        words = WORDS.get(kind, getattr(kind, "__name__", str(kind)))
        if inspect.isclass(kind) and _is_list(kind):
            is_fixed = kind is tuple and arguments and ... not in arguments
            words = f"a list of {len(arguments)}" if is_fixed else "a list"
        yield words
