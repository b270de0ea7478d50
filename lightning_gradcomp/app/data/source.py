"""What a data set is to the training process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

Pair = tuple[Dataset[Any], Dataset[Any]]
"""Images to train with, and to validate with: float (channels, height, width) and an int each."""


@dataclass(frozen=True)
class Source:
    """Images by class, not read yet.

    Args:
        channels: of an image.
        size: its height and width in pixels.
        classes: how many there are.
        load: reads them, or finds their files; on every rank.
        images: how many there are to train with, where that is known before.
        prepare: makes what `load` needs, on rank 0 alone.
        workers: processes that decode, for each rank.
    """

    channels: int
    size: int
    classes: int
    load: Callable[[], Pair]
    images: int | None = None
    prepare: Callable[[], None] = lambda: None
    workers: int = 0
