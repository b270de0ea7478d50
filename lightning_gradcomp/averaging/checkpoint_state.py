"""States in checkpoints: checked against the model, and for a world of another size the mean of all ranks' states."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.errors import refusal

CHECKPOINT_STATES = ("auto", "gather", "sidecar", "mean", "drop")
"""What may become of the states of all ranks in a checkpoint."""
PARTITION = "partition_residual"
"""The kind of state of which each owner has a partition: they are added up, which makes one owner's of all."""

Shapes = Mapping[str, tuple[int, ...]]
TYPES: dict[str, Any] = {
    "steps": int, "memory": dict, "shapes": dict, "dense_shapes": dict, "workers": int, "trained": list,
    "shared_by": int, "autotune": dict | None,
}  # fmt: skip
"""What `GradientAverager.state_dict` has."""


def check_state(state: Any, kinds: Iterable[str]) -> None:
    """ValueError for what is no `GradientAverager.state_dict()`, or one of a method that remembers something else.

    Args:
        state: what was loaded.
        kinds: of state that must be there: the compressor's, whose parts may be empty.
    """
    what, allowed = "the state of GradientAverager", "what GradientAverager.state_dict() returned, whole"
    if not isinstance(state, Mapping) or set(TYPES) - set(state):
        lacking = sorted(set(TYPES) - set(state)) if isinstance(state, Mapping) else list(TYPES)
        raise refusal(what, f"a {type(state).__name__} without {', '.join(lacking)}", allowed)
    for key, expected in TYPES.items():
        if not isinstance(state[key], expected):
            raise refusal(f"{what}, {key!r}", f"a {type(state[key]).__name__}", allowed)
    memory = state["memory"]
    for kind, parts in memory.items():
        if not isinstance(parts, Mapping) or not all(isinstance(part, torch.Tensor) for part in parts.values()):
            raise refusal(what, f"{kind!r} that is no dict of tensors", allowed)
    if memory and (lacking := [kind for kind in kinds if kind not in memory]):
        got = f"a state of another method, with {', '.join(sorted(memory))}"
        raise refusal(
            "the state of GradientAverager", got, f"one with {', '.join(lacking)}, which this compressor keeps"
        )


def mean_state(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of what all ranks remember; every rank of any world may load it.

    It keeps what is conserved: everything applied so far + the mean over ranks of what is remembered. Sums are in fp64.
    What topology="auto" has measured among other ranks is left out: the new ones begin another trial.

    Args:
        states: `GradientAverager.state_dict()` of every rank, in any order; they are read one by one.
    """
    total: dict[str, dict[str, torch.Tensor]] = {}
    world, last = 0, {}
    for last in states:
        world += 1
        for kind, parts in last["memory"].items():
            if all_floating(parts):
                add(total.setdefault(kind, {}), parts)
    copies = world // last.get("workers", world)  # of a partition, on the ranks of one worker
    memory = {kind: divided(parts, copies if kind == PARTITION else world) for kind, parts in total.items()}
    return {**last, "memory": memory, "workers": 1, "autotune": None}


def all_floating(parts: Mapping[str, torch.Tensor]) -> bool:
    """Whether these are numbers, which have a mean."""
    return all(part.is_floating_point() for part in parts.values())


def add(total: dict[str, torch.Tensor], parts: Mapping[str, torch.Tensor]) -> None:
    """total += parts, name by name, in fp64; a name that one side lacks counts as 0 there."""
    for name, part in parts.items():
        total[name] = total[name] + part.double() if name in total else part.double()


def divided(total: Mapping[str, torch.Tensor], world: int) -> dict[str, torch.Tensor]:
    """total / world in fp32."""
    return {name: (part / world).float() for name, part in total.items()}


def check_shapes(compressed: Shapes, dense: Shapes, gradients: Gradients, *, warn: bool) -> None:
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
    # Workers take over what owners remembered where partitions are others.
    lost = [
        kind for kind, parts in saved.items() if kind != PARTITION and set(parts) & known - set(loaded.get(kind, {}))
    ]
    if lost:
        warnings.warn(
            f"What the checkpoint keeps as {_some(lost)} is lost: with its options of now, nothing uses it.",
            stacklevel=3,
        )


def _some(names: Iterable[str]) -> str:
    listed = [repr(name) for name in names]
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
