"""The optimizer's step: it applies averages that include its momentum, and commits error feedback.

After a compressed average with momentum correction, `p.grad` is an update direction. torch's SGD, Adam and AdamW then
apply it unchanged:

    θ ← (1 - lr · λ) θ - lr · p.grad        λ: decoupled weight decay

(times 2^k, if `p.grad` would overflow: `Gradients.exponents`.)

They collect a group's parameters and gradients in `_init_group`, which runs inside `step`: after its closure and all
pre-step hooks, before all post-step hooks. `OptimizerStep` removes the parameters whose gradients are directions, and
applies these itself. A hook may therefore change `p.grad` or a weight, as without compression.

Private torch names used here: `Optimizer._init_group` and `Optimizer._optimizer_step_post_hooks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakMethod

import torch

from lightning_gradcomp.averaging.fsdp.shards import local


class Steps(Protocol):
    """What `OptimizerStep` needs from an averager."""

    def direction_exponent(self, parameter: torch.Tensor) -> int | None:
        """As `GradientAverager.direction_exponent`."""
        ...

    def commit(self, optimizer: torch.optim.Optimizer) -> None:
        """As `GradientAverager.commit`."""
        ...


class OptimizerStep:
    """Extends an optimizer's `step` until `detach`. If the optimizer lacks torch's hooks, the caller commits.

    With `directions`, gradients may be update directions, and the optimizer is torch's SGD, Adam or AdamW. The averager
    is held by weak references.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, steps: Steps, *, directions: bool) -> None:
        self.optimizer = optimizer
        self._exponent, self._commit = WeakMethod(steps.direction_exponent), WeakMethod(steps.commit)
        self._hook = None
        if hasattr(optimizer, "_optimizer_step_post_hooks"):
            self._hook = optimizer.register_step_post_hook(self._after_step)
            hooks = optimizer._optimizer_step_post_hooks
            for key in [key for key in hooks if key != self._hook.id]:  # the user's hooks run after it
                hooks[key] = hooks.pop(key)
        if directions:
            vars(optimizer)["_init_group"] = self._init_group

    def detach(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        if vars(self.optimizer).get("_init_group") == self._init_group:
            del vars(self.optimizer)["_init_group"]

    def _after_step(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        if commit := self._commit():
            commit(optimizer)

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        """Apply the update directions, and call the optimizer's own `_init_group` for all other parameters."""
        exponent: Callable[[torch.Tensor], int | None] = self._exponent() or (lambda parameter: None)
        ours = [(parameter, k) for parameter in group["params"] if (k := exponent(parameter)) is not None]
        if ours:
            apply_directions(self.optimizer, group, *zip(*ours, strict=True))
            taken = {id(parameter) for parameter, _ in ours}
            group = {**group, "params": [each for each in group["params"] if id(each) not in taken]}
        collect: Any = type(self.optimizer)
        return collect._init_group(self.optimizer, group, *lists)


@torch.no_grad()
def apply_directions(
    optimizer: Any, group: dict[str, Any], parameters: Sequence[torch.Tensor], exponents: Sequence[int]
) -> None:
    """Apply θ ← (1 - lr · λ) θ - lr · 2^k · p.grad to these parameters of a group of SGD, Adam or AdamW."""
    applied = [
        (local(parameter), local(parameter.grad), k)
        for parameter, k in zip(parameters, exponents, strict=True)
        if parameter.grad is not None
    ]
    if not applied:
        return
    weights, directions = [weight for weight, _, _ in applied], [direction for _, direction, _ in applied]
    if (scale := getattr(optimizer, "grad_scale", None)) is not None:  # a GradScaler leaves both to fused optimizers
        directions = [direction / scale for direction in directions]
    if (found_inf := getattr(optimizer, "found_inf", None)) is not None:
        directions = [torch.where(found_inf > 0, 0, direction) for direction in directions]
    lr = float(group["lr"])
    adam = isinstance(optimizer, torch.optim.Adam)
    if adam and group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)):
        shrink = 1 - lr * group["weight_decay"]
        if shrink != 1:
            torch._foreach_mul_(weights, shrink if found_inf is None else torch.where(found_inf > 0, 1.0, shrink))
    if any(k or weight.dtype == torch.float16 for weight, _, k in applied):  # in fp16, a small lr would be 0
        steps = zip(weights, directions, (k for _, _, k in applied), strict=True)
        for weight, direction, k in steps:
            weight.sub_(direction.float() * math.ldexp(lr, k))
        return
    torch._foreach_add_(weights, directions, alpha=-lr)
