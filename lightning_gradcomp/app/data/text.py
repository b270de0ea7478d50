"""Text files as bytes: a folder of your own, or Python's standard library, which every machine has."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

from lightning_gradcomp.app.data.tokens import SharedTokens
from lightning_gradcomp.errors import refusal

EVERY = 20
"""Every 20th file is for validation."""
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
"""Folders of the standard library's path that are installed packages or tests."""


class Text(SharedTokens):
    """The bytes of text files, sorted by path and joined by newlines. Every 20th file is for validation.

    Of fewer than 20 files, the last twentieth of the bytes is. Hidden files and folders are skipped. Every rank holds
    the whole text in memory.
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
        except (ValueError, IndexError, TypeError, AttributeError, NotImplementedError) as error:  # depends on Python
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
