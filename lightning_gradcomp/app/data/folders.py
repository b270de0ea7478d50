"""Images in a folder for each class: ImageNet, or your own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.datasets import ImageFolder as Images

from lightning_gradcomp.app.data.missing import MissingData, class_folders, missing
from lightning_gradcomp.app.data.source import Pair, Source
from lightning_gradcomp.app.data.transforms import to_train, to_validate
from lightning_gradcomp.app.options.data import Augment, ImageFolder

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, by channel, as in torchvision's recipes


def folders(options: ImageFolder, augment: Augment) -> Source:
    """dir/train/<class>/* and dir/val/<class>/* as 3 x size x size pixels; classes by the names of their folders."""
    root, size = Path(options.dir).expanduser(), options.size

    def load() -> Pair:
        try:
            train = Images(str(root / "train"), to_train(augment, size, MEAN, STD), loader=read)
            return train, Images(str(root / "val"), to_validate(augment, size, MEAN, STD), loader=read)
        except FileNotFoundError as error:  # a class without an image, such as on a node that has a disk of its own
            raise missing(options, str(error)) from error

    return Source(3, size, len(class_folders(root / "train")), load, workers=options.workers, prefetch=options.prefetch)


def read(path: str) -> Image.Image:
    """A picture of 8 bits in each of three channels. Of 16-bit grey, which Pillow would clip, the upper 8 are taken.

    Raises:
        MissingData: it can't be read, or has pixels of 32 bits.
    """
    try:
        with Image.open(path) as picture:
            if picture.mode.startswith("I;16") or (picture.mode, picture.format) == ("I", "PNG"):
                return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8)).convert("RGB")
            if picture.mode in ("I", "F"):
                raise MissingData(f"{path}: pixels of 32 bits, whose white is not known; convert it to 8 or 16")
            return picture.convert("RGB")
    except OSError as error:
        raise MissingData(f"{path}: {error}") from error
