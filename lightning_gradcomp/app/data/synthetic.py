"""Random images in memory, of any shape: for throughput, and for dry runs."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from lightning_gradcomp.app.data.source import Source

DIFFERENT = 64
"""Images that are drawn; the others are copies of them, so that any number fits into memory."""


class Repeated(TensorDataset):
    """The same images repeatedly, `images` in all."""

    def __init__(self, images: int, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.images = images

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return super().__getitem__(index % DIFFERENT)

    def __len__(self) -> int:
        return self.images


def synthetic(channels: int, size: int, classes: int, images: int, val_images: int) -> Source:
    """Normal pixels with labels at random: `images` to train with, `val_images` to validate with."""

    def load() -> tuple[Repeated, Repeated]:
        generator = torch.Generator().manual_seed(0)  # equal on all ranks
        pixels = torch.randn(DIFFERENT, channels, size, size, generator=generator, dtype=torch.float32)
        labels = torch.randint(classes, (DIFFERENT,), generator=generator)
        return Repeated(images, pixels, labels), Repeated(val_images, pixels, labels)

    return Source(channels, size, classes, load, images=images)
