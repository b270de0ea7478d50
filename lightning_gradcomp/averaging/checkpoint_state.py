"""Averager states in checkpoints: checks against the model, and the mean over ranks for a different world size."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.errors import refusal

CHECKPOINT_STATES = ("auto", "gather", "sidecar", "mean", "drop")
"""Ways to save the states of all ranks in a checkpoint."""
PARTITION = "partition_residual"
"""The kind of state that is split among the owners: each has its partition, and their sum is the whole."""

Shapes = Mapping[str, tuple[int, ...]]
TYPES: dict[str, Any] = {
    "steps": int, "memory": dict, "shapes": dict, "dense_shapes": dict, "workers": int, "trained": list,
    "shared_by": int, "autotune": dict | None,
}  # fmt: skip
"""Keys and types of `GradientAverager.state_dict`."""


def check_entries(state: Any, types: Mapping[str, Any], what: str, allowed: str) -> None:
    """Raise ValueError, with `what` and `allowed`, unless `state` is a dict with the keys and types of `types`."""
    if not isinstance(state, Mapping) or set(types) - set(state):
        lacking = sorted(set(types) - set(state)) if isinstance(state, Mapping) else list(types)
        raise refusal(what, f"a {type(state).__name__} without {', '.join(lacking)}", allowed)
    for key, expected in types.items():
        if not isinstance(state[key], expected):
            raise refusal(f"{what}, {key!r}", f"a {type(state[key]).__name__}", allowed)


def check_state(state: Any, kinds: Iterable[str]) -> None:
    what, allowed = "the state of GradientAverager", "what GradientAverager.state_dict() returned, unchanged"
    check_entries(state, TYPES, what, allowed)
    memory = state["memory"]
    for kind, parts in memory.items():
        if not isinstance(parts, Mapping) or not all(isinstance(part, torch.Tensor) for part in parts.values()):
            raise refusal(what, f"{kind!r} that is not a dict of tensors", allowed)
    if memory and (lacking := [kind for kind in kinds if kind not in memory]):
        got = f"a state of another method, with {', '.join(sorted(memory))}"
        raise refusal(
            "the state of GradientAverager", got, f"one with {', '.join(lacking)}, which this compressor keeps"
        )


def mean_state(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of all ranks' states, which every rank of a world of any size can load.

    Applied updates plus the mean of the ranks' residuals are conserved. Sums are in fp64. The mean leaves out the
    trials of topology="auto", because a different set of ranks needs its own trial. States are read one at a time, in
    any order.
    """
    total: dict[str, dict[str, torch.Tensor]] = {}
    world, last = 0, {}
    for last in states:
        world += 1
        for kind, parts in last["memory"].items():
            if all_floating(parts):
                sums = total.setdefault(kind, {})
                for name, part in parts.items():  # a name missing on a rank counts as 0 there
                    sums[name] = sums[name] + part.double() if name in sums else part.double()
    copies = world // last.get("workers", world)  # copies of each partition: one per rank of a worker
    memory = {
        kind: {name: (part / (copies if kind == PARTITION else world)).float() for name, part in sums.items()}
        for kind, sums in total.items()
    }
    return {**last, "memory": memory, "workers": 1, "autotune": None}


def all_floating(parts: Mapping[str, torch.Tensor]) -> bool:
    """True if all tensors are floating-point, and so have a mean."""
    return all(part.is_floating_point() for part in parts.values())


def check_shapes(compressed: Shapes, dense: Shapes, gradients: Gradients, *, warn: bool) -> None:
    """Raises ValueError if the saved state of a parameter has another shape than here, or is not compressed here.

    With `warn`, warns about parameters that only the state or only the model has. `compressed` and `dense` have the
    shapes of the parameters that were compressed, and of the others that have a residual.
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
        lost = f"The checkpoint's state of {_some(gone)} is lost: the model has no such parameters."
        warnings.warn(lost, stacklevel=3)
    if warn and new:
        lacking = f"The checkpoint has no state of {_some(new)}: it did not have these parameters."
        warnings.warn(lacking, stacklevel=3)


def warn_of_lost_kinds(
    saved: Mapping[str, Mapping[str, torch.Tensor]],
    loaded: Mapping[str, Mapping[str, torch.Tensor]],
    gradients: Gradients,
    *,
    accumulates: bool,
) -> None:
    """Warn about kinds of state that the compressor does not keep with its current options.

    `saved` and `loaded` are kind -> parameter name -> tensor, before and after loading. `accumulates` is True if the
    compressor has error feedback.
    """
    known = {*gradients.chosen, *gradients.left_dense}
    # If partitions have changed, the workers take over the owners' residuals.
    taken_over = {PARTITION} if accumulates else set()
    lost = [
        kind
        for kind, parts in saved.items()
        if kind not in taken_over and set(parts) & known - set(loaded.get(kind, {}))
    ]
    if lost:
        warnings.warn(
            f"The checkpoint's {_some(lost)} is lost: the current options do not use it.",
            stacklevel=3,
        )


def _some(names: Iterable[str]) -> str:
    listed = [repr(name) for name in names]
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
