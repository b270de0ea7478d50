"""Sequences of tokens, for language models."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from lightning_gradcomp.app.data.shared import Pair, SharedData
from lightning_gradcomp.errors import refusal


class Windows(Dataset[torch.Tensor]):
    """Int64 windows of `context` + 1 tokens that start at multiples of `context`: each token but the first is a target
    in one window."""

    def __init__(self, tokens: torch.Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self.context
        return self.tokens[start : start + self.context + 1].long()


class SharedTokens(SharedData):
    """Windows of a sequence of tokens, `batch_size` per training step over all ranks together.

    A subclass defines `name`, `vocabulary`, `unit` and `tokens`. Options: conf/data/tokens.yaml.
    """

    vocabulary: int
    """Number of different tokens."""
    unit: str = "token"
    """What a token is, in the names of metrics: "byte" gives val_bits_per_byte."""
    examples = "windows"

    def __init__(
        self, batch_size: int = 32, context: int = 64, validation_windows: int | None = 2048, seed: int = 0
    ) -> None:
        super().__init__(batch_size, seed)
        for option, got in (("context", context), ("validation_windows", validation_windows)):
            if (type(got) is not int or got < 1) and not (option == "validation_windows" and got is None):
                raise refusal(f"data.{option}", got, "a whole number from 1")
        self.context, self.validation_windows = context, validation_windows

    @abstractmethod
    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens to train and to validate with: integers in [0, vocabulary), of any integer dtype, 1-D."""

    @property
    def model_options(self) -> dict[str, Any]:
        return {"vocabulary": self.vocabulary, "context": self.context}

    @property
    def validation_batch(self) -> int:
        return self.rank_batch

    def stand_in(self, batch_size: int) -> SharedData:
        return RandomTokens(self, batch_size)

    def load(self) -> Pair:
        train, val = (Windows(tokens, self.context) for tokens in self.tokens())
        count = min(len(val), self.validation_windows or len(val))
        return train, Subset(val, [index * len(val) // count for index in range(count)])

    def check(self) -> None:
        train, val = self.tokens()
        batch = f"data.batch_size={self.batch_size} windows of data.context={self.context}"
        parts = ((train, "train", self.batch_size, batch), (val, "validate", 1, "a window"))
        for tokens, purpose, windows, fills in parts:
            if len(tokens) <= windows * self.context:
                allowed = f"{windows * self.context + 1} or more, {fills}"
                raise refusal(f"{self.unit}s to {purpose} with", len(tokens), allowed)


class RandomTokens(SharedTokens):
    """Uniformly distributed tokens with the vocabulary and the context of `like`, the same on all ranks."""

    name = "random tokens"

    def __init__(self, like: SharedTokens, batch_size: int) -> None:
        super().__init__(batch_size, like.context, seed=like.seed)
        self.vocabulary, self.unit = like.vocabulary, like.unit

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        batch = self.batch_size * self.context
        tokens = torch.randint(self.vocabulary, (3 * batch + 2,), generator=generator)
        return tokens[: 2 * batch + 1], tokens[2 * batch + 1 :]
