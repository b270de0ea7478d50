"""Random images in memory, of any shape, for throughput measurements and dry runs."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from lightning_gradcomp.app.data.augment import Augment
from lightning_gradcomp.app.data.images import SharedImages
from lightning_gradcomp.app.data.shared import Pair
from lightning_gradcomp.errors import refusal

DIFFERENT = 64
"""Number of distinct images; the others are copies of them, so that any number fits into memory."""


class Repeated(TensorDataset):
    """The same images repeated, `images` in total."""

    def __init__(self, images: int, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.images = images

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return super().__getitem__(index % DIFFERENT)

    def __len__(self) -> int:
        return self.images


class Synthetic(SharedImages):
    """Normally distributed pixels with random labels, the same on all ranks.

    Args:
        batch_size: images per step, over all ranks together; also the number of validation images.
        size: pixels per side.
        classes: number of classes.
        images: images per epoch.
        channels: channels of an image.
        augment: MixUp, CutMix and label smoothing; the images are not transformed.
        seed: seed for the order of the images.

    Raises:
        ValueError: if an option is out of range.
    """

    name = "synthetic"

    def __init__(
        self,
        batch_size: int = 64,
        size: int = 224,
        classes: int = 1000,
        images: int = 1280,
        channels: int = 3,
        augment: Augment = Augment(),  # noqa: B008 - frozen
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, augment, seed)
        augment.check_in_memory("data=synthetic")
        for option, got, least in (("size", size, 8), ("classes", classes, 2), ("images", images, 1)):
            if type(got) is not int or got < least:
                raise refusal(f"data.{option}", got, f"a whole number from {least}")
        self.size, self.classes, self.images, self.channels = size, classes, images, channels

    def load(self) -> Pair:
        generator = torch.Generator().manual_seed(0)
        shape = (DIFFERENT, self.channels, self.size, self.size)
        pixels = torch.randn(shape, generator=generator, dtype=torch.float32)
        labels = torch.randint(self.classes, (DIFFERENT,), generator=generator)
        return Repeated(self.images, pixels, labels), Repeated(self.batch_size, pixels, labels)
