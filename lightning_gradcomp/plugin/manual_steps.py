"""Manual optimization: when gradients are averaged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lightning_gradcomp.averaging import GradientAverager
from lightning_gradcomp.errors import refusal


def parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    """ids of the optimizer's parameters."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


class ManualSteps(ABC):
    """Averages after a backward if all its gradients are one optimizer's, otherwise when an optimizer steps.

    The first is as with DDP, so that a norm or a NaN is the same on all ranks. If another backward follows before the
    step, `take_back` restores this rank's own gradients for it to add to.

    With several optimizers, gradients that `zero_grad()` discards, as a GAN does with the other network's, are not
    accumulated: each optimizer's step averages its own. Step each optimizer inside `stepping`, after
    `before_optimizer_step`.
    """

    def __init__(self) -> None:
        self._stepping = False
        self._pending: dict[int, bool] = {}
        """id of each parameter with a gradient to average or record -> True if DDP has averaged it."""
        self._backwards = 0

    @abstractmethod
    def _average(
        self, averager: GradientAverager, optimizer: torch.optim.Optimizer | None, *, by_ddp: bool, revocable: bool
    ) -> None:
        """Average the gradients of `optimizer`'s parameters, or record the average if it was `by_ddp`. Collective.

        Without an optimizer, those of all parameters.
        """

    def take_back(self, averager: GradientAverager) -> bool:
        """Before a backward, restore this rank's own gradients unless an optimizer has used their average.

        Returns:
            True if some were restored.
        """
        restored = averager.revoke()
        self._pending |= {id(parameter): False for parameter in restored}
        return bool(restored)

    def is_pending(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if `optimizer` has gradients to average, or an average to record."""
        return bool(self._pending_of(optimizer))

    def note_backward(
        self,
        averager: GradientAverager,
        parameters: Sequence[torch.nn.Parameter],
        *,
        by_ddp: bool = False,
        accumulates: bool = False,
    ) -> bool:
        """Average the gradients of a backward if one optimizer has all the parameters, or none has any. Collective.

        Args:
            by_ddp: True if DDP has averaged the gradients.
            accumulates: True if they are not to be averaged yet.

        Returns:
            True if the averager averaged here.
        """
        ids = {id(p) for p in parameters}
        self._pending |= dict.fromkeys(ids, by_ddp)
        if accumulates:
            return False
        self._backwards += 1
        if averager.gradients.are_unknown:  # no step of an optimizer that is known would average them
            self._pending = {}
            self._average(averager, None, by_ddp=by_ddp, revocable=False)
            return not by_ddp
        owners = [each for each in averager.optimizers if self._pending_of(each) & ids]
        return len(owners) == 1 and self._average_pending(averager, owners[0], revocable=True)

    def before_optimizer_step(self, averager: GradientAverager, optimizer: torch.optim.Optimizer) -> bool:
        """Average the gradients of `optimizer`'s parameters, unless that was done after backward. Collective.

        Returns:
            True if the averager averaged here.
        """
        if not self.is_pending(optimizer):
            return False
        self.take_back(averager)  # another optimizer's
        if not all(self._pending[each] for each in self._pending_of(optimizer)):
            averager.check_same_turn(optimizer, self._backwards)
        return self._average_pending(averager, optimizer)

    def _average_pending(
        self, averager: GradientAverager, optimizer: torch.optim.Optimizer, *, revocable: bool = False
    ) -> bool:
        averaged = [self._pending.pop(each) for each in self._pending_of(optimizer)]
        by_ddp = all(averaged)
        self._average(averager, optimizer, by_ddp=by_ddp, revocable=revocable)
        return not by_ddp

    def _pending_of(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """ids of `optimizer`'s parameters with gradients to average or record."""
        return parameter_ids(optimizer) & self._pending.keys()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Wrap an optimizer's step, which uses the gradients."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def check_averaged(self, optimizer: torch.optim.Optimizer, what: str, allowed: str) -> None:
        """Raise ValueError before `optimizer` steps, unless inside `stepping` or its gradients are averaged."""
        if not self._stepping and self.is_pending(optimizer):
            raise refusal(what, f"torch's own {type(optimizer).__name__}", allowed)
