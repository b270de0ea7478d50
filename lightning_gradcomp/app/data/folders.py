"""Images in one folder per class: ImageNet, or your own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.datasets import ImageFolder as Images

from lightning_gradcomp.app.data.augment import Augment
from lightning_gradcomp.app.data.files import Files
from lightning_gradcomp.app.data.shared import MissingData, Pair

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, per channel, as in torchvision's recipes


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
            if not any(path.is_file() for path in folder.rglob("*")):
                raise self.missing(f"no image in {folder.relative_to(self.root)}")

    def load(self) -> Pair:
        try:
            train = Images(str(self.root / "train"), self.augment.to_train(self.size, MEAN, STD), loader=read)
            return train, Images(str(self.root / "val"), self.augment.to_validate(self.size, MEAN, STD), loader=read)
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
