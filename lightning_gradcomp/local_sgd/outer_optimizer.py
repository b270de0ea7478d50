"""The outer optimizer: how the anchor follows the mean update of a round."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gradcomp.errors import refusal


@dataclass(frozen=True)
class Nesterov:
    """The outer optimizer of DiLoCo: `torch.optim.SGD(nesterov=True)` on a round's mean update, negated.

    Source: Douillard et al. 2023, arXiv 2311.08105.

    Args:
        lr: outer learning rate, above 0. With `momentum=0`, 1 is plain averaging.
        momentum: outer momentum, from 0 to below 1.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise refusal("Nesterov.lr", self.lr, "a number above 0")
        if not 0 <= self.momentum < 1:
            raise refusal("Nesterov.momentum", self.momentum, "0 <= momentum < 1")


PLAIN_AVERAGING = Nesterov(lr=1.0, momentum=0.0)
"""No outer optimizer: the mean update is added to the anchor."""
