"""The learning rate of the recipes: a linear warm-up, then a cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lightning_gradcomp.errors import is_number, refusal


def warmup_cosine(step: int, warmup_steps: int, total_steps: int, end: float = 0.0) -> float:
    """Factor on the peak learning rate at `step` (from 0): up to 1 in `warmup_steps`, then a cosine to `end`.

    >>> [round(warmup_cosine(step, 2, 6), 3) for step in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    cosine = (1 + math.cos(math.pi * (step - warmup_steps) / max(1, total_steps - warmup_steps))) / 2
    return end + (1 - end) * cosine


@dataclass(frozen=True, kw_only=True)
class WarmupCosine:
    """Makes the scheduler of a run."""

    warmup_steps: int | None = 20
    warmup_epochs: float | None = None
    end: float = 0.0

    def __post_init__(self) -> None:
        if (self.warmup_steps is None) == (self.warmup_epochs is None):
            what = f"scheduler.warmup_steps with warmup_epochs={self.warmup_epochs}"
            raise refusal(what, self.warmup_steps, "one of the two, the other null")
        for option in ("warmup_steps", "warmup_epochs"):
            if (got := getattr(self, option)) is not None and not (is_number(got) and got >= 0):
                raise refusal(f"scheduler.{option}", got, "null, or 0 or more")
        if not is_number(self.end) or not 0 <= self.end <= 1:
            raise refusal("scheduler.end", self.end, "0 to 1")

    def __call__(
        self, optimizer: torch.optim.Optimizer, epoch_steps: int, epochs: int
    ) -> torch.optim.lr_scheduler.LambdaLR:
        """The scheduler of a run of `epochs` epochs with `epoch_steps` optimizer steps each."""
        warmup = self.warmup_steps if self.warmup_steps is not None else round((self.warmup_epochs or 0) * epoch_steps)
        factor = lambda step: warmup_cosine(step, warmup, epochs * epoch_steps, self.end)  # noqa: E731
        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
