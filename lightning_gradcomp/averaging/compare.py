"""A saved state against the model that it is loaded for: nothing that doesn't fit is dropped without a word."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import torch

from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.errors import refusal


def compare(saved: Mapping[str, tuple[int, ...]], gradients: Gradients, *, warn: bool) -> None:
    """Refuse what can't be right, and warn of parameters that only one side has.

    Args:
        saved: shape of every parameter that was compressed when the state was saved.
        gradients: the model's.
        warn: whether this rank is the one that warns.

    Raises:
        ValueError: a parameter with another shape, or one that is left dense here.
    """
    for name, shape in saved.items():
        if name in gradients.left_dense:
            raise refusal("min_elements or exclude", f"options that leave {name!r} dense", "those of the checkpoint")
        if name in gradients.chosen and tuple(shape) != gradients.chosen[name]:
            raise ValueError(f"state of {name!r}: got shape {tuple(shape)}, allowed: {gradients.chosen[name]}")
    gone = [name for name in saved if name not in gradients.chosen]
    new = [name for name in gradients.chosen if name not in saved]
    if warn and gone:
        warnings.warn(
            f"What the checkpoint remembers of {_some(gone)} is lost: the model has no such parameters.", stacklevel=3
        )
    if warn and new:
        warnings.warn(
            f"The checkpoint remembers nothing of {_some(new)}: it did not have these parameters.", stacklevel=3
        )


def warn_of_lost_kinds(
    saved: Mapping[str, Mapping[str, torch.Tensor]],
    loaded: Mapping[str, Mapping[str, torch.Tensor]],
    gradients: Gradients,
) -> None:
    """Warn of kinds of state that the compressor, with the options that it has now, does not keep."""
    lost = [kind for kind, parts in saved.items() if set(parts) & set(gradients.chosen) - set(loaded.get(kind, {}))]
    if lost:
        warnings.warn(
            f"What the checkpoint keeps as {_some(lost)} is lost: with its options of now, nothing uses it.",
            stacklevel=3,
        )


def _some(names: Iterable[str]) -> str:
    listed = [repr(name) for name in names]
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
