"""Manual optimization: which gradients an optimizer's step has yet to average."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_gradcomp.averaging import GradientAverager
from lightning_gradcomp.errors import refusal


class ManualSteps(ABC):
    """Averages an optimizer's gradients when it steps, and no others.

    Gradients that `zero_grad()` discards, as a GAN does with the other network's, are then not accumulated. Step each
    optimizer inside `stepping`, after `before_optimizer_step`.
    """

    def __init__(self) -> None:
        self._stepping = False
        self._pending: dict[int, bool] = {}
        """id of each parameter with an unused gradient -> True if it is averaged."""

    @abstractmethod
    def before_optimizer_step(self, averager: GradientAverager, optimizer: torch.optim.Optimizer) -> bool:
        """Average the gradients of `optimizer`'s parameters, unless no backward has changed them since. Collective.

        Returns:
            True if the averager averaged here.
        """

    def _pending_of(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """ids of `optimizer`'s parameters whose gradients `before_optimizer_step` has yet to average or record."""
        return {id(p) for group in optimizer.param_groups for p in group["params"]} & self._pending.keys()

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
        if not self._stepping and self._pending_of(optimizer):
            raise refusal(what, f"torch's own {type(optimizer).__name__}", allowed)
