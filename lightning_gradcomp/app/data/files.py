"""Data sets whose images are files: CIFAR-10 and Fashion-MNIST, read and downloaded by torchvision."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, ClassVar

from torch.utils.data import TensorDataset
from torchvision import datasets

from lightning_gradcomp.app.data.augment import Augment
from lightning_gradcomp.app.data.images import SharedImages
from lightning_gradcomp.app.data.shared import Pair
from lightning_gradcomp.errors import refusal


class Files(SharedImages):
    """Images in files below the folder `dir`, `size` pixels per side for the network."""

    channels = 3
    where = "data.dir, or the environment's GRADCOMP_DATA"

    def __init__(self, batch_size: int, dir: str, size: int, workers: int, prefetch: int, augment: Augment, seed: int):
        super().__init__(batch_size, augment, seed, workers, prefetch)
        augment.check_size(size)
        if not isinstance(dir, str):
            raise refusal("data.dir", dir, "a folder")
        self.root, self.size = Path(dir).expanduser(), size


class Torchvision(Files):
    """A data set of torchvision, whose test images are for validation."""

    images: ClassVar[Any]
    """torchvision's class."""
    folder: ClassVar[str]
    """Where it looks for the files, below `dir`."""
    pixels: ClassVar[int]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    """Per channel, of the training images."""

    def __init__(
        self,
        batch_size: int = 256,
        dir: str = "data",
        workers: int = 2,
        prefetch: int = 2,
        download: bool = True,
        augment: Augment = Augment(),  # noqa: B008 - frozen
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, dir, self.pixels, workers, prefetch, augment, seed)
        self.download = download

    def check(self) -> None:
        if not (self.download or (self.root / self.folder).is_dir()):
            raise self.missing(f"there is no folder {self.folder}")

    def prepare_data(self) -> None:
        """Runs on rank 0 only, while the others wait."""
        if not self.download:
            return
        try:
            with redirect_stdout(sys.stderr):  # the text of the progress bar
                self.images(str(self.root), download=True)
        except (OSError, RuntimeError) as error:  # no network, a full disk; a damaged file
            raise self.missing(f"the download failed: {' '.join(str(error).split())}") from error

    def load(self) -> Pair:
        train = self.augment.to_train(self.size, self.mean, self.std)
        val = self.augment.to_validate(self.size, self.mean, self.std)
        try:
            return self.images(str(self.root), True, train), self.images(str(self.root), False, val)
        except (OSError, RuntimeError, ValueError, AssertionError) as error:  # missing on a node of its own; damaged
            raise self.missing(f"files are missing or damaged in {self.folder}") from error


class CIFAR10(Torchvision):
    """CIFAR-10 (Krizhevsky 2009): 50,000 images to train, 10,000 to validate; 3x32x32."""

    name, images, folder, classes, pixels = "CIFAR-10", datasets.CIFAR10, "cifar-10-batches-py", 10, 32
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    how_to_get = "Get it with data.download=true, or unpack cifar-10-python.tar.gz of www.cs.toronto.edu/~kriz there"


class FashionMNIST(Torchvision):
    """Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747): 60,000 images to train, 10,000 to validate; 1x28x28."""

    name, images, folder, channels = "Fashion-MNIST", datasets.FashionMNIST, "FashionMNIST/raw", 1
    classes, pixels, mean, std = 10, 28, (0.2860,), (0.3530,)
    how_to_get = "Get it with data.download=true, or unpack its four files into that folder"

    def load(self) -> Pair:
        train, val = super().load()
        return train if self.augment.changes_images else _in_memory(train), _in_memory(val)


def _in_memory(images: Any) -> TensorDataset:
    """All images of a torchvision data set, transformed at once, which is faster than one by one."""
    return TensorDataset(images.transform(images.data.unsqueeze(1)), images.targets)
