"""Deep Gradient Compression: Lin, Han, Mao, Wang, Dally, ICLR 2018, arXiv 1712.01887.

Where the paper and its authors' code (github.com/synxlin/deep-gradient-compression) differ, what is done here, and why:

- Local clipping. Paper: threshold x N^(-1/2), for gradients already divided by N. Code: no factor, not configured.
  Here: threshold x N^(1/2), the paper's rule for PyTorch's undivided gradients, on the whole local gradient, as
  vanilla clipping does (the paper doesn't say which norm; the code has one per tensor).
- Selection. Paper: a sample gives the threshold, and an exact top-k follows where too many pass. Code: exact top-k
  above 1.3 k; between k and 1.3 k the first k in index order; it may send 0.8 k. Here: exactly the k largest, ties
  spread evenly.
- Nesterov. Paper: corrected. Code: not wired to the gradients. Here: as torch.optim.SGD's.
- Weight decay. Paper: silent. Code: a dense momentum of its own in the optimizer. Here: added to the local gradient,
  so that it is inside the momentum, at the strength it has in SGD; and no second buffer is needed.
- Masking at density 1 would turn momentum SGD into plain SGD. Code: dense path without masking. Here: the same.
- Warm-up. Paper: 75, 93.75, 98.4375, 99.6 %. Code: density ρ^((e+1)/(W+1)). Here: the code's formula, which for four
  epochs to 99.9 % is the paper's list within 0.1 points and fits any other sparsity; dense epochs come first, since
  low sparsities save nothing on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from lightning_gradcomp.compressors.base import Card, Codec
from lightning_gradcomp.compressors.decoded import Sparse
from lightning_gradcomp.compressors.kernels.formats import check_format
from lightning_gradcomp.compressors.kernels.sparse import pack_sparse, sparse_bytes, unpack_sparse
from lightning_gradcomp.compressors.kernels.topk import count_each, topk_each
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.schedules import Ramp, check_sparsity, exponential
from lightning_gradcomp.compressors.state import SGDVelocity
from lightning_gradcomp.errors import is_number, is_whole, refusal
from lightning_gradcomp.registry import entries, register


@register("dgc")
@dataclass(kw_only=True)
class DGC(Codec):
    """Deep Gradient Compression: the largest 0.1 % of the velocity, with momentum correction (needs SGD).

    Source: Lin et al., ICLR 2018, arXiv 1712.01887. The head of this file has the differences.

    Args:
        sparsity: share of each tensor that is not sent once the warm-up is over, in [0, 1). 0 is dense training.
        warmup_epochs: epochs of rising sparsity before that, one level an epoch (§3.3). Fine-tuning needs none.
        dense_epochs: epochs of plain dense training before the warm-up.
        values: how the sent velocities are written, "fp32", "bf16", "fp16" or "int8" (with a scale for each 256). What
            rounding changes stays in the velocity.
        momentum_masking: stop the momentum of what was sent (momentum factor masking, §3.2).
        clip_norm: global-norm threshold of the averaged gradient that local clipping (§3.2) stands in for; each rank
            clips its own gradient at √N times it, before accumulation. Dense phases clip the average at it. None: off.

    Raises:
        ValueError: an option out of its range.
    """

    card: ClassVar[Card] = Card(
        sends="the largest 0.1 % of each tensor's velocity: fp32 values, Elias-Fano indices",
        remembers="momentum and velocity",
        pick="SGD with momentum, on any slow link: the fewest bytes, and the accuracy of dense training",
        source="[Lin et al. 2018](https://arxiv.org/abs/1712.01887)",
    )
    owns_momentum: ClassVar[bool] = True

    sparsity: float = 0.999
    values: str = "fp32"
    dense_epochs: int = 1
    warmup_epochs: int = 4
    momentum_masking: bool = True
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sparsity("DGC.sparsity", self.sparsity)
        check_format("DGC.values", self.values)
        if not is_whole(self.dense_epochs) or self.dense_epochs < 0:
            raise refusal("DGC.dense_epochs", self.dense_epochs, "a whole number from 0")
        if self.clip_norm is not None and not (is_number(self.clip_norm) and self.clip_norm > 0):
            raise refusal("DGC.clip_norm", self.clip_norm, "None or a finite number above 0")

    @property
    def final_sparsity(self) -> float:
        """`sparsity`."""
        return self.sparsity

    def at(self, sparsity: float) -> DGC:
        """With this sparsity."""
        return self if sparsity == self.sparsity else replace(self, sparsity=sparsity)

    def check_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Momentum correction is for `torch.optim.SGD`."""
        others = ", ".join(entry.strategy for entry in entries() if not entry.cls.owns_momentum)
        allowed = f"torch.optim.SGD itself, whose momentum is corrected; for other optimizers: {others}"
        SGDVelocity.check_optimizer("the optimizer of DGC", optimizer, allowed)

    def schedule(self) -> Ramp:
        """Dense epochs, the exponential ramp, then `sparsity`."""
        return Ramp(tuple(exponential(self.sparsity, self.warmup_epochs)), self.sparsity, dense=self.dense_epochs)

    @property
    def clips(self) -> bool:
        """With `clip_norm`."""
        return self.clip_norm is not None

    def clip_local(self, gradient: Sequence[torch.Tensor], workers: int) -> None:
        """Rescale a worker's gradient to a norm of at most √N · clip_norm.

        The mean of N independent gradients has about 1/√N of the norm of one, so √N · clip_norm locally stands in for
        clip_norm on the average.
        """
        if self.clip_norm is not None:
            norm = torch.linalg.vector_norm(torch.stack([part.norm() for part in gradient]))
            for part in gradient:
                part.mul_(torch.clamp(workers**0.5 * self.clip_norm / (norm + 1e-6), max=1.0))

    def clip_average(self, parameters: Sequence[torch.Tensor], grad_scale: float) -> None:
        """Vanilla clipping at clip_norm."""
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm * grad_scale)

    def state(self, layout: Layout, device: torch.device) -> SGDVelocity:
        """Momentum and velocity."""
        return SGDVelocity(layout, device, masking=self.momentum_masking)

    def payload_bytes(self, layout: Layout) -> int:
        """Values, then indices."""
        return sparse_bytes(layout.n, count_each(layout, 1 - self.sparsity), self.values)

    def encode(self, flat: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Sparse]:
        """The k largest velocities of each tensor: as a payload (uint8), and as it decodes."""
        return pack_sparse(flat, topk_each(flat, layout, 1 - self.sparsity), self.values)

    def decode(self, payload: torch.Tensor, layout: Layout) -> Sparse:
        """What a worker sent."""
        return unpack_sparse(payload, layout.n, count_each(layout, 1 - self.sparsity), self.values)
