"""The user's side of the optimizer: torch's own, with a linear warm-up and a cosine, per optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from lightning_gradcomp.app.config import SGD, Optimizer


def warmup_cosine(step: int, warmup_steps: int, total_steps: int) -> float:
    """The share of the peak learning rate at `step` (from 0): up to 1 in `warmup_steps`, then a cosine to 0.

    >>> [round(warmup_cosine(step, 2, 6), 3) for step in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return (1 + math.cos(math.pi * (step - warmup_steps) / max(1, total_steps - warmup_steps))) / 2


def build(
    options: Optimizer, parameters: Iterable[torch.nn.Parameter], total_steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """The optimizer that `options` describe, and its schedule over `total_steps` optimizer steps."""
    common = {"lr": options.lr, "weight_decay": options.weight_decay}
    if isinstance(options, SGD):
        optimizer = torch.optim.SGD(parameters, momentum=options.momentum, nesterov=options.nesterov, **common)
    else:
        optimizer = torch.optim.AdamW(parameters, **common)
    share = lambda step: warmup_cosine(step, options.warmup_steps, total_steps)  # noqa: E731
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)
