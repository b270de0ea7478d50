"""The user's side of the optimizer: torch's own, with a linear warm-up and a cosine, per optimizer step."""

from __future__ import annotations

import math
from typing import Any

import torch

from lightning_gradcomp.app.options.training import SGD, Optimizer

POSITIONS = "relative_position_bias_table"
"""Of Swin's attention: a table, but not a matrix that multiplies."""


def warmup_cosine(step: int, warmup_steps: int, total_steps: int) -> float:
    """The share of the peak learning rate at `step` (from 0): up to 1 in `warmup_steps`, then a cosine to 0.

    >>> [round(warmup_cosine(step, 2, 6), 3) for step in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return (1 + math.cos(math.pi * (step - warmup_steps) / max(1, total_steps - warmup_steps))) / 2


def groups(options: Optimizer, module: torch.nn.Module) -> list[dict[str, Any]]:
    """The parameters of `module`, those without weight decay apart."""
    decayed, spared = [], []
    for name, parameter in module.named_parameters():
        decays = options.decay_all or (parameter.dim() > 1 and not name.endswith(POSITIONS))
        (decayed if decays else spared).append(parameter)
    found = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return [group for group in found if group["params"]]


def build(
    options: Optimizer, module: torch.nn.Module, total_steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """The optimizer that `options` describe, and its schedule over `total_steps` optimizer steps."""
    if isinstance(options, SGD):
        rest = {"momentum": options.momentum, "nesterov": options.nesterov}
        optimizer = torch.optim.SGD(groups(options, module), lr=options.lr, **rest)
    else:
        optimizer = torch.optim.AdamW(groups(options, module), lr=options.lr)
    share = lambda step: warmup_cosine(step, options.warmup_steps, total_steps)  # noqa: E731
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)
