"""A saved state against the model that it is loaded for: nothing that doesn't fit is dropped without a word."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import torch

from lightning_gradcomp.averaging.elastic import OWNED
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.errors import refusal

Shapes = Mapping[str, tuple[int, ...]]


def compare(compressed: Shapes, dense: Shapes, gradients: Gradients, *, warn: bool) -> None:
    """Refuse what can't be right, and warn of parameters that only one side has.

    Args:
        compressed: shape of every parameter that was compressed when the state was saved.
        dense: shape of every other that something was remembered of.
        gradients: the model's.
        warn: whether this rank is the one that warns.

    Raises:
        ValueError: a parameter with another shape, or one that is left dense here.
    """
    here = {**gradients.chosen, **gradients.left_dense}
    for name in compressed:
        if name in gradients.left_dense:
            raise refusal("min_elements or exclude", f"options that leave {name!r} dense", "those of the checkpoint")
    saved = {**compressed, **dense}
    for name, shape in saved.items():
        if name in here and tuple(shape) != here[name]:
            raise ValueError(f"state of {name!r}: got shape {tuple(shape)}, allowed: {here[name]}")
    gone = [name for name in saved if name not in here]
    new = [name for name in gradients.chosen if name not in saved]
    if warn and gone:
        lost = f"What the checkpoint remembers of {_some(gone)} is lost: the model has no such parameters."
        warnings.warn(lost, stacklevel=3)
    if warn and new:
        lacking = f"The checkpoint remembers nothing of {_some(new)}: it did not have these parameters."
        warnings.warn(lacking, stacklevel=3)


def warn_of_lost_kinds(
    saved: Mapping[str, Mapping[str, torch.Tensor]],
    loaded: Mapping[str, Mapping[str, torch.Tensor]],
    gradients: Gradients,
) -> None:
    """Warn of kinds of state that the compressor, with the options that it has now, does not keep."""
    known = {*gradients.chosen, *gradients.left_dense}
    # What owners remembered is remembered by ranks where there are no such owners.
    lost = [kind for kind, parts in saved.items() if kind != OWNED and set(parts) & known - set(loaded.get(kind, {}))]
    if lost:
        warnings.warn(
            f"What the checkpoint keeps as {_some(lost)} is lost: with its options of now, nothing uses it.",
            stacklevel=3,
        )


def _some(names: Iterable[str]) -> str:
    listed = [repr(name) for name in names]
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
