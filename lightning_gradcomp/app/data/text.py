"""Sequences of tokens for language models; text files as bytes."""

from __future__ import annotations

import sysconfig
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from lightning_gradcomp.app.data.shared import Pair, SharedData
from lightning_gradcomp.errors import check_whole, refusal

EVERY = 20
"""Every 20th file is for validation."""
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
"""Folders of the standard library's path that are installed packages or tests."""


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
        check_whole("data.context", context, 1)
        if validation_windows is not None:
            check_whole("data.validation_windows", validation_windows, 1)
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


class Text(SharedTokens):
    """The bytes of text files, sorted by path and joined by newlines. Every 20th file is for validation.

    They are in a folder of your own, or Python's standard library, which every machine has. Of fewer than 20 files, the
    last twentieth of the bytes is for validation. Hidden files and folders are skipped. Every rank holds the whole text
    in memory.
    """

    name, vocabulary, unit = "text", 256, "byte"
    how_to_get = "Put text files there, or train on Python's standard library with data.dir=null"

    def __init__(
        self,
        batch_size: int = 32,
        dir: str | None = None,
        pattern: str = "**/*",
        context: int = 64,
        validation_windows: int | None = 2048,
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, context, validation_windows, seed)
        if not isinstance(dir, str | None):
            raise refusal("data.dir", dir, "a folder, or null")
        self.is_library, self.pattern = dir is None, pattern
        self.root = Path(sysconfig.get_path("stdlib") if dir is None else dir).expanduser()

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        files = self.files()
        texts = [self._read(path) for path in files]
        if len(files) >= EVERY:
            val = texts[EVERY - 1 :: EVERY]
            train = [text for index, text in enumerate(texts, 1) if index % EVERY]
            return joined(train), joined(val)
        whole = joined(texts)
        cut = len(whole) - len(whole) // EVERY
        return whole[:cut], whole[cut:]

    def files(self) -> list[Path]:
        """The files, sorted by their paths relative to the folder."""
        if not self.root.is_dir():
            raise self.missing("there is no such folder")
        pattern = "**/*.py" if self.is_library else self.pattern
        try:
            relative = [path.relative_to(self.root) for path in self.root.glob(pattern) if path.is_file()]
        # A bad pattern raises one of these in pathlib, which one depends on the version of Python.
        except (ValueError, IndexError, TypeError, AttributeError, NotImplementedError) as error:
            raise refusal("data.pattern", pattern, "a glob pattern below data.dir, such as **/*.txt") from error
        kept = [path for path in relative if not any(part.startswith(".") for part in path.parts)]
        if self.is_library:
            kept = [path for path in kept if not LEFT_OUT & set(path.parts)]
        if not kept:
            raise self.missing(f"no file matches {pattern}")
        return [self.root / path for path in sorted(kept)]

    def _read(self, path: Path) -> bytes:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise self.missing(str(error)) from error
        if b"\0" in text:
            raise self.missing(f"{path} is not a text: it has a zero byte; data.pattern chooses files")
        return text


def joined(texts: list[bytes]) -> torch.Tensor:
    """The texts with newlines in between, uint8 [bytes]."""
    whole = bytearray(b"\n".join(texts))
    return torch.frombuffer(whole, dtype=torch.uint8) if whole else torch.empty(0, dtype=torch.uint8)
