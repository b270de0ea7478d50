"""The interface of a data set to the training process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

Pair = tuple[Dataset[Any], Dataset[Any]]
"""Images to train with, and to validate with: float (channels, height, width) and an int each."""


@dataclass(frozen=True)
class Source:
    """A data set of images by class, before it is read.

    Args:
        channels: of an image.
        size: its height and width in pixels.
        classes: number of classes.
        load: reads the images, or finds their files; on every rank.
        images: number of training images, where it is known before `load`.
        prepare: prepares what `load` needs, such as a download, on rank 0 alone.
        workers: decoding processes a rank.
        prefetch: batches that each of them decodes ahead.
        dirichlet: how unequal the ranks' own images are, `data/federated.py`; None: every rank draws from all.
    """

    channels: int
    size: int
    classes: int
    load: Callable[[], Pair]
    images: int | None = None
    prepare: Callable[[], None] = lambda: None
    workers: int = 0
    prefetch: int = 2
    dirichlet: float | None = None
