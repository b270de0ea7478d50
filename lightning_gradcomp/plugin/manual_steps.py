"""Which gradients are averaged when, in manual optimization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightning_gradcomp.averaging import GradientAverager
from lightning_gradcomp.averaging.trainable import parameters_of


class Turn(NamedTuple):
    """Gradients to average now.

    Args:
        optimizer: the optimizer of their parameters. None: the gradients of all parameters.
        ddp_seconds: if DDP has averaged them, the time of its exchange that backward did not hide; else None.
        revocable: True if another backward may add to them before the optimizer steps.
    """

    optimizer: torch.optim.Optimizer | None = None
    ddp_seconds: float | None = None
    revocable: bool = False

    def average(self, averager: GradientAverager, grad_scale: float) -> None:
        """Average the gradients, or record what DDP has averaged."""
        if self.ddp_seconds is None:
            averager.average(grad_scale=grad_scale, optimizer=self.optimizer, revocable=self.revocable)
        else:
            averager.after_dense_step(grad_scale=grad_scale, seconds=self.ddp_seconds, optimizer=self.optimizer)


class ManualSteps:
    """Decides after which backward, or before which optimizer's step, gradients are averaged.

    After a backward if all its gradients are one optimizer's, as with DDP, so that a norm or a NaN is the same on all
    ranks. If another backward follows before the step, `take_back` restores this rank's own gradients for it to add to.

    With several optimizers, gradients that `zero_grad()` discards, as a GAN does with the other network's, are not
    accumulated: each optimizer's step averages its own.
    """

    def __init__(self) -> None:
        self.pending: dict[int, float | None] = {}
        """id of each parameter with a gradient to average -> `ddp_seconds`, as in `Turn`."""
        self._backwards = 0

    def take_back(self, averager: GradientAverager) -> bool:
        """Before a backward, restore this rank's own gradients unless an optimizer has used their average.

        Returns True if some were restored.
        """
        restored = averager.revoke()
        self.pending |= {id(parameter): None for parameter in restored}
        return bool(restored)

    def is_pending(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if `optimizer` has gradients to average."""
        return bool(self._pending_of(optimizer))

    def after_backward(
        self,
        averager: GradientAverager,
        parameters: Sequence[torch.nn.Parameter],
        *,
        ddp_seconds: float | None = None,
        accumulates: bool = False,
    ) -> Turn | None:
        """What to average after a backward: its gradients if one optimizer has all the parameters, or none has any.

        `parameters` are those that require gradients. With `accumulates`, they are not to be averaged yet.
        """
        ids = {id(p) for p in parameters}
        self.pending |= dict.fromkeys(ids, ddp_seconds)
        if accumulates:
            return None
        self._backwards += 1
        if averager.gradients.are_unknown:  # no step of an optimizer that is known would average them
            self.pending = {}
            return Turn(ddp_seconds=ddp_seconds)
        owners = [each for each in averager.optimizers if self._pending_of(each) & ids]
        return self._turn_of(owners[0], revocable=True) if len(owners) == 1 else None

    def before_step(self, averager: GradientAverager, optimizer: torch.optim.Optimizer) -> Turn | None:
        """What to average before `optimizer` steps: its gradients, unless that was done after backward. Collective."""
        if not self.is_pending(optimizer):
            return None
        self.take_back(averager)  # another optimizer's
        if any(self.pending[each] is None for each in self._pending_of(optimizer)):
            averager.check_same_turn(optimizer, self._backwards)
        return self._turn_of(optimizer)

    def _turn_of(self, optimizer: torch.optim.Optimizer, *, revocable: bool = False) -> Turn:
        seconds = [self.pending.pop(each) for each in self._pending_of(optimizer)]
        by_ddp = [each for each in seconds if each is not None]
        return Turn(optimizer, max(by_ddp) if len(by_ddp) == len(seconds) else None, revocable)

    def _pending_of(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """ids of `optimizer`'s parameters with gradients to average."""
        return {id(p) for p in parameters_of(optimizer)} & self.pending.keys()
