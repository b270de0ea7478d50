"""Deep Gradient Compression: Lin, Han, Mao, Wang, Dally, ICLR 2018, arXiv 1712.01887.

The paper is about momentum SGD. With Adam and AdamW, their steps accumulate instead (updates.py).

Differences between the paper, its authors' code (github.com/synxlin/deep-gradient-compression) and this file:

- Local clipping. Paper: threshold x N^(-1/2), for gradients already divided by N. Code: no factor, not configured.
  Here: threshold x N^(1/2), the paper's rule for PyTorch's undivided gradients, on the norm of the whole local
  gradient, as in ordinary clipping. The paper doesn't say which norm; the code has one per tensor.
- Selection. Paper: a sample gives the threshold, and an exact top-k follows if too many pass. Code: exact top-k
  above 1.3 k; between k and 1.3 k the first k in index order; it may send 0.8 k. Here: exactly the k largest, ties
  spread evenly.
- Nesterov. Paper: corrected. Code: not wired to the gradients. Here: as torch.optim.SGD's.
- Weight decay. Paper: silent. Code: a separate dense momentum in the optimizer. Here: added to the local gradient,
  so that it is part of the momentum, as strong as in SGD, and needs no second buffer.
- Masking at density 1 would turn momentum SGD into plain SGD. Code: dense path without masking. Here: as the code.
- Density and values. Paper: 0.1 % in fp32. Here: 0.4 % in 2 bits by default, the same number of bytes. The rounding
  error stays in the residual.
- Warm-up. Paper: 75, 93.75, 98.4375, 99.6 %, an epoch each. Code: density ρ^((e+1)/(W+1)). Here: the paper's levels
  from 93.75 % on. Each lasts until a rank has sent as many entries as there are elements: 16 and 64 steps, whatever
  the length of an epoch. With `warmup_epochs`: the code's formula, which for four epochs to 99.9 % is within
  0.1 points of the paper's list. With Adam: no warm-up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from lightning_gradcomp.compressors.base import Card, SparseCodec
from lightning_gradcomp.compressors.error_feedback import ErrorFeedback
from lightning_gradcomp.compressors.kernels.rows import Rows
from lightning_gradcomp.compressors.kernels.topk import count_each, topk_each
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.schedules import Ramp, check_sparsity, exponential, quarters
from lightning_gradcomp.compressors.updates import AdamStep, SGDVelocity, check_adam, check_sgd, is_adam
from lightning_gradcomp.errors import check_whole, refusal
from lightning_gradcomp.registry import entries, register

SGD_SPARSITY = 0.996
SGD_START = 0.9375
ADAM_SPARSITY = 0.97


@register("dgc")
@dataclass(kw_only=True)
class DGC(SparseCodec):
    """Deep Gradient Compression: the largest 0.4 % of the velocity, with momentum correction (SGD, Adam, AdamW).

    Source: Lin et al., ICLR 2018, arXiv 1712.01887. The differences are in docs/dgc.md. The paper's own settings are
    `DGC(sparsity=0.999, values="fp32", warmup_epochs=4)` in a strategy with `local_weights=False`.

    Args:
        sparsity: fraction of each tensor that stays unsent after the warm-up, in [0, 1); 0 is dense training. `None`
            means 0.996 with SGD and 0.97 with Adam and AdamW.
        start_sparsity: sparsity of the first steps. Each further level has a quarter of the density, until it reaches
            that of `sparsity`; a level of density ρ lasts 1/ρ steps. A value at or above `sparsity` means no warm-up.
            `None` means 0.9375 with SGD and no warm-up with Adam and AdamW.
        warmup_steps: dense steps before those of `start_sparsity`. `None` means 0.
        dense_epochs: dense epochs at the start, instead of the levels from `start_sparsity`.
        warmup_epochs: epochs of rising sparsity after the dense ones, one level an epoch (§3.3 of the paper), instead
            of the levels from `start_sparsity`.
        momentum_masking: set the momentum of the sent entries to 0 (momentum factor masking, §3.2 of the paper; SGD
            only). Turn it off for a large embedding table if a batch touches few rows: their entries are sent at once
            and would never gain momentum.
    """

    card: ClassVar[Card] = Card(
        sends="the largest 0.4 % of entries, in 2 bits (Adam: 3 %)",
        pick="SGD over 1 Gbit/s or less; AdamW on two ranks, if `eden` sends too much",
        source="[Lin et al. 2018](https://arxiv.org/abs/1712.01887)",
    )
    needs_optimizer: ClassVar[bool] = True

    sparsity: float | None = None
    values: str = "int2"
    start_sparsity: float | None = None
    dense_epochs: int = 0
    momentum_masking: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("DGC.dense_epochs", self.dense_epochs, 0)
        if self.start_sparsity is not None:
            check_sparsity("DGC.start_sparsity", self.start_sparsity)
            if self._by_epoch:
                allowed = "None together with dense_epochs or warmup_epochs"
                raise refusal("DGC.start_sparsity", self.start_sparsity, allowed)
        if self.dense_epochs and self.warmup_steps is not None:
            raise refusal("DGC.warmup_steps with dense_epochs", self.warmup_steps, "None: one of the two")

    @property
    def final_sparsity(self) -> float:
        return SGD_SPARSITY if self.sparsity is None else self.sparsity

    @property
    def _by_epoch(self) -> bool:
        return bool(self.dense_epochs or self.warmup_epochs)

    def check_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        others = ", ".join(entry.strategy for entry in entries() if not entry.cls.needs_optimizer)
        allowed = f"torch.optim.SGD, Adam or AdamW itself, whose momentum is corrected; for other optimizers: {others}"
        if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            check_adam("the optimizer of DGC", optimizer, allowed)
        else:
            check_sgd("the optimizer of DGC", optimizer, allowed)

    def for_optimizer(self, optimizer: torch.optim.Optimizer | None) -> DGC:
        if not is_adam(optimizer):
            return self.with_sparsity(self.final_sparsity)
        sparsity = ADAM_SPARSITY if self.sparsity is None else self.sparsity
        start = sparsity if self.start_sparsity is None and not self._by_epoch else self.start_sparsity
        return replace(self, sparsity=sparsity, start_sparsity=start)

    def schedule(self) -> Ramp:
        """The ramp from `start_sparsity`, or dense epochs and the exponential ramp, up to `sparsity`."""
        if self._by_epoch:
            levels = exponential(self.final_sparsity, self.warmup_epochs or 0)
            return Ramp(tuple(levels), self.final_sparsity, dense=self.dense_epochs)
        start = SGD_START if self.start_sparsity is None else self.start_sparsity
        levels = quarters(start, self.final_sparsity)
        return Ramp(tuple(levels), self.final_sparsity, dense=self.dense_steps, by="coverage")

    def state_for(self, optimizer: torch.optim.Optimizer | None) -> ErrorFeedback:
        """The steps that the optimizer would have made accumulate."""
        return AdamStep() if is_adam(optimizer) else SGDVelocity(masking=self.momentum_masking)

    def count(self, layout: Layout) -> int:
        return count_each(Rows.of(layout.sizes), 1 - self.final_sparsity)

    def select(self, flat: torch.Tensor, layout: Layout) -> torch.Tensor:
        return topk_each(flat, Rows.of(layout.sizes), 1 - self.final_sparsity)
