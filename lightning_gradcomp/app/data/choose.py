"""From the options of a data set to its images."""

from __future__ import annotations

from pathlib import Path

from lightning_gradcomp.app.data import digits
from lightning_gradcomp.app.data.missing import class_folders
from lightning_gradcomp.app.data.source import Source
from lightning_gradcomp.app.data.synthetic import synthetic
from lightning_gradcomp.app.options.data import CIFAR10, Augment, Data, Digits, ImageFolder, Synthetic

SHAPES: dict[type[Data], tuple[int, int, int]] = {Digits: (1, 8, 10), CIFAR10: (3, 32, 10)}
"""Channels, pixels and classes."""


def choose(data: Data, augment: Augment) -> Source:
    """The data set that `data` describes."""
    if isinstance(data, CIFAR10):
        from lightning_gradcomp.app.data.cifar10 import cifar10  # imports torchvision, which takes a second

        return cifar10(data, augment)
    if isinstance(data, ImageFolder):
        from lightning_gradcomp.app.data.folders import folders

        return folders(data, augment)
    if isinstance(data, Synthetic):
        return synthetic(3, data.size, data.classes, data.images, data.batch_size)
    assert isinstance(data, Digits)
    return digits.source(data.fold, data.dirichlet)


def stand_in(data: Data, images: int) -> Source:
    """`images` random images of the shape of `data`; 1,000 classes where the folders that show their number are
    missing."""
    if isinstance(data, Synthetic):
        shape = 3, data.size, data.classes
    elif isinstance(data, ImageFolder):
        shape = 3, data.size, len(class_folders(Path(data.dir).expanduser() / "train")) or 1000
    else:
        shape = SHAPES[type(data)]
    return synthetic(*shape, images, images)
