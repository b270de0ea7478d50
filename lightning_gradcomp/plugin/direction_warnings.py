"""Warnings for hooks that find update directions in `p.grad`, where a user may expect gradients."""

from __future__ import annotations

import math

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_gradcomp.averaging import GradientAverager
from lightning_gradcomp.averaging.fsdp.shards import local
from lightning_gradcomp.averaging.stats import norm

OURS = ("lightning", "lightning_gradcomp")
WATCHED = 10
"""Number of steps whose norms are compared."""
RESCALED = 5.0
"""A hook that changes the norm by more than this factor probably takes it for a gradient's."""
INSTEAD = (
    "To clip, use Trainer(gradient_clip_val=...) or the compressor's clip_norm, which clip each rank's gradient before "
    "it is accumulated. "
    "To have gradients in p.grad, choose a method without error feedback, such as 'ddp_int8' or 'eden'."
)


class DirectionWarnings:
    """Warns, once each, of hooks that find update directions in `p.grad`, and of hooks that rescale or discard them.

    Without such hooks it measures nothing. With them, the first step takes a norm of the gradients, and the first
    `WATCHED` steps take two norms of the directions. In manual optimization these two are always taken, because
    `training_step` may rescale the directions itself.
    """

    def __init__(self, averager: GradientAverager, trainer: Trainer, module: LightningModule) -> None:
        self._averager = averager
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        hooks = ["on_before_optimizer_step", "on_after_backward"]
        found = [f"{_name(each)}.{hook}" for each in (*callbacks, module) for hook in hooks if _has(each, hook)]
        self._hooks = list(dict.fromkeys(found))
        automatic = module.automatic_optimization  # else nothing calls the module's optimizer_step
        self._training_step = [] if automatic else [f"{_name(module)}.training_step"]
        """Steps by itself in manual optimization. Nothing shows whether it reads the directions."""
        self._own_step = f"{_name(module)}.optimizer_step" if automatic and _has(module, "optimizer_step") else ""
        self._gradients: dict[int, torch.Tensor] = {}
        """id of each parameter -> norm of its gradient before the first average."""
        self._averaged: float | None = None
        """Norm of the directions that the optimizer has not used yet."""
        self._left, self._warned = WATCHED, False

    def before_average(self) -> None:
        """Call before gradients are averaged."""
        if not (self._hooks or self._own_step or self._training_step) or not self._left:
            return
        if self._averaged is not None:
            self._compare(0.0)
        if (self._hooks or self._own_step) and not self._warned and self._averager.begin_step().compressor is not None:
            grads = [(id(p), local(p.grad)) for p in self._averager.gradients.averaged if p.grad is not None]
            self._gradients = {key: torch.linalg.vector_norm(grad, dtype=torch.float32) for key, grad in grads}

    def after_average(self, *, in_step: bool) -> None:
        """Call after the averager has averaged gradients, before other hooks run.

        With `in_step`, the strategy's `optimizer_step` has begun, so an overridden `optimizer_step` of the module can't
        change `p.grad` before the optimizer uses it.
        """
        if self._own_step and not in_step:
            self._hooks.append(self._own_step)
        self._own_step = ""
        if not (self._hooks or self._training_step) or not self._left or not (directions := self._directions()):
            return
        averaged = norm([local(p.grad) for p in directions if p.grad is not None])
        if self._hooks and not self._warned:
            before = norm([self._gradients[id(p)] for p in directions if id(p) in self._gradients])
            self._warn_of_hooks(averaged / before if before else math.nan)
        autotune = self._averager.autotune
        if 0 < averaged < math.inf and not (autotune and autotune.measuring):
            self._averaged, self._left = averaged / self._averager.gradients.scale, self._left - 1

    def revoked(self) -> None:
        """Call after an average was revoked, which is no discard."""
        self._averaged = None

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Call after the optimizer's step, before its gradients are zeroed."""
        if self._averaged is not None:
            used = norm([local(p.grad) for p in self._directions() if p.grad is not None])
            unscales = getattr(optimizer, "_step_supports_amp_scaling", False)  # as Lightning asks
            self._compare(used / (self._averager.gradients.scale if unscales else 1.0))

    def _directions(self) -> list[torch.nn.Parameter]:
        return [p for p in self._averager.gradients.averaged if self._averager.direction_exponent(p) is not None]

    def _warn_of_hooks(self, times: float) -> None:
        if not math.isfinite(times):
            return
        self._warned, self._gradients = True, {}
        rank_zero_warn(
            f"{' and '.join(self._hooks)}: with {self._method}, p.grad holds update directions here, not gradients. "
            f"Their norm is now about {times:.2g} times that of this rank's gradient. {INSTEAD}"
        )

    def _compare(self, used: float) -> None:
        averaged, self._averaged = self._averaged, None
        if not averaged or averaged / RESCALED <= used <= averaged * RESCALED or not math.isfinite(used):
            return
        self._left = 0
        did = f"had a norm of {averaged:.2g} in p.grad, and of {used:.2g} when the optimizer used them"
        if not used:
            did = f"had a norm of {averaged:.2g} in p.grad, and were discarded before the optimizer used them"
        where = " or ".join([*self._hooks, *self._training_step])
        rank_zero_warn(
            f"{where}: the update directions of {self._method} {did}. A limit "
            f"that is meant for gradients shortens or skips nearly every step. {INSTEAD}"
        )

    @property
    def _method(self) -> str:
        return f"{type(self._averager.compressor).__name__} and {type(self._averager.optimizer).__name__}"


def _name(owner: Callback | LightningModule) -> str:
    return type(owner).__qualname__


def _has(owner: Callback | LightningModule, hook: str) -> bool:
    """True if `owner`'s hook is a user's: neither Lightning's nor this package's."""
    package, _, _ = getattr(getattr(owner, hook), "__module__", "").partition(".")
    return package not in OURS
