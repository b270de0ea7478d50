"""Prediction of the next token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from lightning_gradcomp.app.data.text import SharedTokens
from lightning_gradcomp.app.scheduler import WarmupCosine
from lightning_gradcomp.app.task import Task


class LanguageModel(Task):
    """Cross entropy of each next token in nats. Validation counts each window once over all ranks.

    The network maps int64 tokens (batch, length) to logits (batch, length, vocabulary).
    """

    data, monitor, mode = SharedTokens, "val_loss", "min"

    def __init__(
        self,
        model: nn.Module,
        data: SharedTokens,
        optimizer: partial[torch.optim.Optimizer],
        scheduler: WarmupCosine,
        decay_all: bool = False,
        compile: bool = False,
        weights: str | None = None,
        frozen: Sequence[str] | None = None,
    ) -> None:
        super().__init__(model, optimizer, scheduler, decay_all, compile, weights, frozen)
        self.unit = data.unit

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.cross_entropy(batch, "mean")
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def count(self, batch: torch.Tensor) -> torch.Tensor:
        """Sum of the losses, number of predicted tokens."""
        losses = self.cross_entropy(batch, "none").double()
        return torch.stack([losses.sum(), torch.ones_like(losses).sum()])

    def metrics(self) -> dict[str, float]:
        loss, tokens = self.counts
        return {"val_loss": loss / tokens, f"val_bits_per_{self.unit}": loss / tokens / math.log(2)}

    def result(self) -> dict[str, float]:
        return {**self.metrics(), "val_tokens": int(self.counts[1])}

    def words(self) -> tuple[str, str]:
        loss, bits = self.metrics().values()
        return (
            "validation loss",
            f"{loss:.4f} nats per {self.unit}, {bits:.4f} bits ({self.counts[1]:,.0f} {self.unit}s)",
        )

    def cross_entropy(self, windows: torch.Tensor, reduction: str) -> torch.Tensor:
        """Of windows int64 (batch, context + 1), whose first token is not predicted."""
        logits = self(windows[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten(), reduction=reduction)
