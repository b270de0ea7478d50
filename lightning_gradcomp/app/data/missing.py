"""The error for missing data: what is missing, where it was looked for, how to get it, and what runs without it."""

from __future__ import annotations

from pathlib import Path

from lightning_gradcomp.app.options.data import CIFAR10, Data, Files, ImageFolder, ImageNet
from lightning_gradcomp.errors import Refused

CIFAR10_FOLDER = "cifar-10-batches-py"
"""torchvision's, and the archive's."""

MEANWHILE = "Meanwhile: gradcomp recipe=digits needs none, and dry_run=true checks everything but the data"
HOW: dict[type[Data], str] = {
    CIFAR10: "Get it with data.download=true, or unpack cifar-10-python.tar.gz of www.cs.toronto.edu/~kriz there",
    ImageNet: "Get it from image-net.org (ILSVRC 2012, after registration), and sort the images by class into "
    "train/n01440764/*.JPEG ... and val/n01440764/*.JPEG ...",
    ImageFolder: "Put images into train/<class>/ and val/<class>/, the same classes in both, or name another folder "
    "with data.dir=...",
}
NAMES: dict[type[Data], str] = {CIFAR10: "CIFAR-10", ImageNet: "ImageNet", ImageFolder: "images"}


class MissingData(Refused):
    """Files that are missing, or can't be used."""


def check(data: Data) -> None:
    """Check that the files of `data` exist.

    Raises:
        MissingData: they don't, or can't be used.
    """
    if isinstance(data, CIFAR10) and not (data.download or (Path(data.dir).expanduser() / CIFAR10_FOLDER).is_dir()):
        raise missing(data, f"there is no folder {CIFAR10_FOLDER}")
    if isinstance(data, ImageFolder):
        root = Path(data.dir).expanduser()
        train, val = (class_folders(root / part) for part in ("train", "val"))
        if not train or not val:
            where = " and ".join(part for part, found in (("train/", train), ("val/", val)) if not found)
            raise missing(data, f"no folders of classes in {where}")
        if different := set(train) ^ set(val):
            some = ", ".join(sorted(different)[:3])
            raise missing(data, f"train/ and val/ have different classes ({len(different)}, such as {some})")
        if len(train) == 1:
            raise missing(data, f"one class alone, {train[0]}")
        for folder in (root / part / name for part in ("train", "val") for name in train):
            if not any(path.is_file() for path in folder.rglob("*")):
                raise missing(data, f"no image in {folder.relative_to(root)}")
        if isinstance(data, ImageNet) and len(train) != 1000:
            raise missing(data, f"{len(train)} classes, not 1,000")


def missing(data: Files, why: str) -> MissingData:
    """The error for files of `data` that can't be used, because of `why`."""
    name, how = NAMES[type(data)], HOW[type(data)]
    where = f"Looked in {Path(data.dir).expanduser().resolve()} (data.dir, or the environment's GRADCOMP_DATA)"
    return MissingData(f"{name}: {why}. {where}. {how}. {MEANWHILE}.")


def class_folders(root: Path) -> list[str]:
    """Names of the folders in `root`, which are classes; none where there is no `root`."""
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []
