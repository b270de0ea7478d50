"""Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747), downloaded by torchvision or from Debian's package."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset
from torchvision.datasets import FashionMNIST as Images

from lightning_gradcomp.app.data.augment import Augment
from lightning_gradcomp.app.data.files import Files
from lightning_gradcomp.app.data.shared import Pair

MEAN, STD = 0.2860, 0.3530  # of the training images
FOLDER = "FashionMNIST/raw"
"""Where torchvision puts the four files."""


class FashionMNIST(Files):
    """60,000 training images, and the 10,000 test images for validation; 1x28x28, held in memory.

    Args:
        batch_size: images per step, over all ranks together.
        dir: holds the four files, or will hold FashionMNIST/raw/ with them.
        workers: processes per rank that augment images.
        prefetch: batches that each of them augments ahead.
        download: rank 0 downloads the files if they are missing.
        augment: augmentation of the training images.
        seed: seed for the order of the images.
    """

    name, channels, classes = "Fashion-MNIST", 1, 10
    how_to_get = (
        "Get it with data.download=true, or, on Debian, with apt install dataset-fashion-mnist and "
        "data.dir=/usr/share/datasets/fashion-mnist"
    )

    def __init__(
        self,
        batch_size: int = 128,
        dir: str = "data",
        workers: int = 0,
        prefetch: int = 2,
        download: bool = True,
        augment: Augment = Augment(),  # noqa: B008 - frozen
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, dir, 28, workers, prefetch, augment, seed)
        self.download = download

    @property
    def folder(self) -> Path:
        """The folder of the four files."""
        return self.root if has_files(self.root) else self.root / FOLDER

    def check(self) -> None:
        if not (self.download or has_files(self.folder)):
            raise self.missing(f"there is no train-images-idx3-ubyte.gz here or in {FOLDER}/")

    def prepare_data(self) -> None:
        """Runs on rank 0 only, while the others wait."""
        if self.download and self.folder != self.root:
            self.fetch(Images)

    def load(self) -> Pair:
        try:
            pixels, labels = read_part(self.folder, "train")
            val_pixels, val_labels = read_part(self.folder, "t10k")
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise self.missing(f"files are missing or damaged in {self.folder}: {error}") from error
        val = TensorDataset(normalised(val_pixels), val_labels)
        if self.augment.changes_images:
            return Augmented(self.augment.to_train(self.size, [MEAN], [STD]), pixels, labels), val
        return TensorDataset(normalised(pixels), labels), val


def has_files(folder: Path) -> bool:
    """True if the files are in `folder`, compressed or not."""
    return any(folder.glob("train-images-idx3-ubyte*"))


class Augmented(TensorDataset):
    """Images that are transformed whenever they are read, with their labels."""

    def __init__(self, transform: Callable[[torch.Tensor], torch.Tensor], *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.transform = transform

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        pixels, label = super().__getitem__(index)
        return self.transform(pixels), label


def read_part(folder: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels uint8 (n, 1, 28, 28) and labels int64 (n) of `part`, which is "train" or "t10k".

    Raises:
        OSError, EOFError, ValueError, zlib.error: if a file is missing or damaged.
    """
    pixels = read_bytes(folder / f"{part}-images-idx3-ubyte", header=16)
    labels = read_bytes(folder / f"{part}-labels-idx1-ubyte", header=8)
    return torch.tensor(pixels.reshape(len(labels), 1, 28, 28)), torch.tensor(labels, dtype=torch.int64)


def read_bytes(path: Path, *, header: int) -> np.ndarray:
    """The bytes after the header: uint8 [n]. The file may be compressed, with .gz at the end of its name."""
    packed = path.with_name(f"{path.name}.gz")
    content = gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()
    return np.frombuffer(content, np.uint8, offset=header)


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 -> float32, with mean 0 and variance 1 over the training images."""
    return (pixels.float() / 255 - MEAN) / STD
