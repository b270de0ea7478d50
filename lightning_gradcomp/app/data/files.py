"""Images in files: CIFAR-10 and Fashion-MNIST, which torchvision downloads, ImageNet, and your own folders."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from torch.utils.data import TensorDataset
from torchvision import datasets

from lightning_gradcomp.app.data.augment import Augment
from lightning_gradcomp.app.data.images import SharedImages
from lightning_gradcomp.app.data.shared import MissingData, Pair
from lightning_gradcomp.errors import refusal

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, per channel, as in torchvision's recipes


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


class ImageFolder(Files):
    """dir/train/<class>/* and dir/val/<class>/*, of any size, as 3 x size x size pixels; folder names are classes."""

    name = "images"
    how_to_get = (
        "Put images into train/<class>/ and val/<class>/, the same classes in both, or name another folder "
        "with data.dir=..."
    )

    def __init__(
        self,
        batch_size: int = 64,
        dir: str = "data/pictures",
        size: int = 224,
        workers: int = 2,
        prefetch: int = 2,
        augment: Augment = Augment(),  # noqa: B008 - frozen
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, dir, size, workers, prefetch, augment, seed)
        self.classes = len(class_folders(self.root / "train")) or 1000  # for a dry run without the images

    def check(self) -> None:
        train, val = (class_folders(self.root / part) for part in ("train", "val"))
        if not train or not val:
            where = " and ".join(part for part, found in (("train/", train), ("val/", val)) if not found)
            raise self.missing(f"no folders of classes in {where}")
        if different := set(train) ^ set(val):
            some = ", ".join(sorted(different)[:3])
            raise self.missing(f"train/ and val/ have different classes ({len(different)}, such as {some})")
        if len(train) == 1:
            raise self.missing(f"one class alone, {train[0]}")
        for folder in (self.root / part / name for part in ("train", "val") for name in train):
            if not any(files for _, _, files in os.walk(folder, followlinks=True)):  # as torchvision
                raise self.missing(f"no image in {folder.relative_to(self.root)}")

    def load(self) -> Pair:
        train = self.augment.to_train(self.size, MEAN, STD)
        val = self.augment.to_validate(self.size, MEAN, STD)
        try:
            return (
                datasets.ImageFolder(str(self.root / "train"), train, loader=read),
                datasets.ImageFolder(str(self.root / "val"), val, loader=read),
            )
        except FileNotFoundError as error:  # a class without an image, such as on a node that has its own disk
            raise self.missing(str(error)) from error


class ImageNet(ImageFolder):
    """ILSVRC 2012: 1,000 classes."""

    name = "ImageNet"
    how_to_get = (
        "Get it from image-net.org (ILSVRC 2012, after registration), and sort the images by class into "
        "train/n01440764/*.JPEG ... and val/n01440764/*.JPEG ..."
    )

    def check(self) -> None:
        super().check()
        if self.classes != 1000:
            raise self.missing(f"{self.classes} classes, not 1,000")


def class_folders(root: Path) -> list[str]:
    """Names of the folders in `root`, one per class; empty if `root` does not exist."""
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []


def read(path: str) -> Image.Image:
    """A picture with three channels of 8 bits. 16-bit grey, which Pillow would clip, keeps its upper 8 bits."""
    try:
        with Image.open(path) as picture:
            if picture.mode.startswith("I;16") or (picture.mode, picture.format) == ("I", "PNG"):
                return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8)).convert("RGB")
            if picture.mode in ("I", "F"):
                raise MissingData(f"{path}: pixels of 32 bits, whose value for white is unknown; convert it to 8 or 16")
            return picture.convert("RGB")
    except OSError as error:
        raise MissingData(f"{path}: {error}") from error
