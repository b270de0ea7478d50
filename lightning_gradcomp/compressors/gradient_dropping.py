"""Gradient dropping: Aji and Heafield, EMNLP 2017, arXiv 1704.05021.

The largest entries of residual + gradient are sent, and the others stay in the residual. Momentum is not corrected, so
any optimizer works: it sees the sparse average as its gradient. In the paper, one threshold for all parameters
("global") is as good as one per matrix if layer normalisation keeps their gradients at one scale, and worse otherwise.
The paper estimates the threshold from 0.1 % of the entries. Here the k largest are exact (kernels/topk.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lightning_gradcomp.compressors.base import DENSE_START, Card, Collectives, SparseCodec
from lightning_gradcomp.compressors.decoded import Decoded
from lightning_gradcomp.compressors.kernels.rows import Rows, row_of
from lightning_gradcomp.compressors.kernels.topk import count_each, topk_each
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.registry import register

CHUNK = 4096
"""Elements per chunk. DeMo and SparseLoCo (arXiv 2411.19870, 2508.15706) use blocks of 64 x 64."""
SCOPES: dict[str, Callable[[Layout], Rows]] = {
    "global": lambda layout: row_of(layout.n),
    "tensor": lambda layout: Rows.of(layout.sizes),
    "chunk": lambda layout: Rows.join(run for n in layout.sizes for run in Rows.cut(n, CHUNK).runs),
}
"""Scope -> the rows in which the largest entries are selected. The rest of a tensor is a shorter chunk."""


@register("gradient_dropping")
@dataclass(kw_only=True)
class GradientDropping(SparseCodec):
    """Gradient dropping: the largest 1 % of residual + gradient; for any optimizer.

    Source: Aji and Heafield, EMNLP 2017, arXiv 1704.05021.

    Args:
        sparsity: fraction of the entries that stays unsent, in [0, 1). The paper uses 0.99.
        scope: where the largest entries are selected: in all tensors together (`"global"`), in each tensor
            (`"tensor"`), or in every 4,096 elements of a tensor (`"chunk"`).
        mean: the divisor of an entry's sum over the ranks. `"ranks"`: their number; error feedback is exact.
            `"senders"`: the number of ranks that sent the entry, as in SparseLoCo; error feedback is not exact, and
            topologies "two_phase" and "server" raise an error.
        warmup_steps: dense steps before the dropping begins. `None` means 22 (the authors' Marian uses 100).
    """

    card: ClassVar[Card] = Card(
        sends="the largest 1 % of residual plus gradient, in fp32",
        pick="another optimizer than SGD or AdamW, if `eden` sends too much",
        source="[Aji and Heafield 2017](https://arxiv.org/abs/1704.05021)",
    )
    default_warmup_steps: ClassVar[int] = DENSE_START

    sparsity: float = 0.99
    values: str = "fp32"
    scope: str = "global"
    mean: str = "ranks"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scope not in SCOPES:
            raise refusal("GradientDropping.scope", self.scope, ", ".join(repr(scope) for scope in SCOPES))
        if self.mean not in ("ranks", "senders"):
            raise refusal("GradientDropping.mean", self.mean, "'ranks' or 'senders'")

    @property
    def averages_over_senders(self) -> bool:  # type: ignore[override]
        return self.mean == "senders"

    @property
    def not_partitioned_because(self) -> str | None:  # type: ignore[override]
        return "the owner of a partition does not pass on who sent an element" if self.averages_over_senders else None

    def count(self, layout: Layout) -> int:
        return count_each(SCOPES[self.scope](layout), 1 - self.sparsity)

    def select(self, flat: torch.Tensor, layout: Layout) -> torch.Tensor:
        return topk_each(flat, SCOPES[self.scope](layout), 1 - self.sparsity)

    def average(
        self, flat: torch.Tensor, layout: Layout, collectives: Collectives, state: Any
    ) -> tuple[Decoded, Decoded]:
        return collectives.mean_of_payloads(self, flat, layout, over_senders=self.averages_over_senders)


SPARSELOCO: dict[str, Any] = {
    "compressor": GradientDropping(
        sparsity=1 - 64 / 4096, scope="chunk", mean="senders", values="int2", dense_values="int8", warmup_epochs=0
    ),
    "period": 15,
    "delay": 0,
    "error_decay": 0.95,
}
"""SparseLoCo: local AdamW steps, of whose sum 1.6 % is sent in 2 bits, with error feedback that decays.

Options of `DelayedAverager` and `DelayedStrategy`.

Source: Sarfi, Thérien, Lidin, Belilovsky: Communication Efficient LLM Pre-training with SparseLoCo, 2025, arXiv
2508.15706. Differences: a chunk in the paper is a block of 64 x 64 elements, here 4,096 consecutive ones. The
authors' code sends four levels between three standard deviations, here a sign and one of two magnitudes computed from
the data. It also scales down updates with a large norm. The outer learning rate is 1, as in the authors' code for 70
billion parameters; for 8 billion they used 0.9: `outer=Nesterov(lr=0.9, momentum=0)`.
"""
