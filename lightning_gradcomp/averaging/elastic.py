"""From the states of all ranks, the one that every rank of a world of another size starts with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

OWNED = "owned"
"""The kind of state that each owner has a part of: the parts are added up, which makes one owner's of all."""


def mean_state(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of what all ranks remember; every rank of any world may load it.

    It keeps what is conserved: everything applied so far + the mean over ranks of what is remembered. Sums are in fp64.
    What is no number (TernGrad's generator) is left out: new ranks begin a new one, and a new trial.

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
    copies = world // last.get("owners", world)  # of an owner's part
    memory = {kind: divided(parts, copies if kind == OWNED else world) for kind, parts in total.items()}
    return {**last, "memory": memory, "owners": 1, "trial": None}


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
