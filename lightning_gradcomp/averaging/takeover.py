"""Momentum and weight decay, taken over from the user's `torch.optim.SGD` for the length of an update.

DGC applies momentum and weight decay to the local gradient, before it is accumulated. They must not act again in the
optimizer, on the parameters that are compressed. Changing the groups for good would poison checkpoints and fight with
schedulers, so the optimizer sees other groups only while it steps: each is split in two, and the part with the
compressed parameters has none of both. The user's own group dicts are never written to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lightning_gradcomp.compressors.memory import Momentum, Velocity
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.registry import entries

BLANK = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}


def check_optimizer(compressor: Any, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse an optimizer whose momentum `compressor` can't take over.

    Raises:
        ValueError: anything but plain `torch.optim.SGD` that minimises.
    """
    if not compressor.owns_momentum:
        return
    what = f"the optimizer of {type(compressor).__name__}"
    others = ", ".join(entry.strategy for entry in entries() if not entry.cls.owns_momentum)
    fits = f"torch.optim.SGD itself, whose momentum is corrected; for other optimizers: {others}"
    if type(optimizer) is not torch.optim.SGD:
        raise refusal(what, "None" if optimizer is None else _qualified(optimizer), fits)
    if any(group["maximize"] or group["differentiable"] for group in optimizer.param_groups):
        raise refusal(what, "SGD(maximize=True) or SGD(differentiable=True)", "SGD with both of them False")


def _qualified(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def rules(optimizer: torch.optim.Optimizer | None, parameters: Sequence[torch.Tensor]) -> list[Momentum]:
    """What the optimizer's groups say of each parameter at this moment; no momentum for one that it doesn't hold."""
    known = {
        id(parameter): Momentum(**{key: group[key] for key in BLANK})
        for group in (optimizer.param_groups if optimizer else [])
        for parameter in group["params"]
    }
    return [known.get(id(parameter), Momentum()) for parameter in parameters]


@contextmanager
def momentum_taken_over(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """While this is entered, `optimizer` applies neither momentum nor weight decay to `parameters`."""
    taken = {id(parameter) for parameter in parameters}
    groups = optimizer.param_groups
    optimizer.param_groups = [part for group in groups for part in _split(group, taken)]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def hand_back(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    momenta: Sequence[torch.Tensor],
    moved: Sequence[bool],
) -> None:
    """Give the optimizer the momentum buffers of the `parameters` that have `moved`, where it uses momentum."""
    for parameter, momentum, has, rule in zip(parameters, momenta, moved, rules(optimizer, parameters), strict=False):
        if has and rule.momentum:
            optimizer.state[parameter]["momentum_buffer"] = momentum.to(parameter.dtype, copy=True)


def adopt(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], names: Sequence[str], memory: Velocity
) -> None:
    """Move the momentum that the optimizer has gathered in dense steps into `memory`, where that has none."""
    for name, parameter in zip(names, parameters, strict=True):
        buffer = optimizer.state.get(parameter, {}).pop("momentum_buffer", None)
        if buffer is not None and name not in memory.started:
            memory.adopt(name, buffer)


def _split(group: dict[str, Any], taken: set[int]) -> list[dict[str, Any]]:
    ours = [parameter for parameter in group["params"] if id(parameter) in taken]
    others = [parameter for parameter in group["params"] if id(parameter) not in taken]
    return [{**group, **BLANK, "params": ours}, {**group, "params": others}]
