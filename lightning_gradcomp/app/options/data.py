"""Options of the data set and of the augmentation of training images."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gradcomp.app.options.limits import number, one_of, whole
from lightning_gradcomp.errors import refusal

SMALL = 64
"""Images of up to this many pixels a side are small: networks have other stems, and crops come from a padded copy."""

LARGEST_IMAGE, MOST_WORKERS = 65536, 1024
"""Pixels a side, and decoding processes a rank, above which a number is taken for a mistake."""


@dataclass(kw_only=True)
class Data:
    """A data set. `batch_size`: images in a step over all ranks together, before accumulation."""

    batch_size: int

    def __post_init__(self) -> None:
        whole("data.batch_size", self.batch_size, 1)


def check_batch(batch_size: int, ranks: int, images: int | None = None) -> None:
    """ValueError for a batch that so many ranks can't share, or that `images`, where they are counted, don't fill."""
    least = 2 * ranks  # batch norm needs two images
    if batch_size % ranks or not least <= batch_size <= (images or batch_size):
        most = f"{least} to {images}" if images else f"{least} or more"
        raise refusal("data.batch_size", batch_size, f"a multiple of {ranks} (ranks), {most}")


@dataclass(kw_only=True)
class Digits(Data):
    """Handwritten digits of 8x8 pixels, in memory.

    Args:
        fold: of a cross-validation; None: the one fixed split.
        dirichlet: each rank has images of its own, unequal by class; the smaller the more. None: all have all.
    """

    fold: int | None
    dirichlet: float | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fold is not None:
            whole("data.fold", self.fold, 0, 4, also="null, or ")
        if self.dirichlet is not None:
            number("data.dirichlet", self.dirichlet, 0.01)


@dataclass(kw_only=True)
class Synthetic(Data):
    """Random pixels, in memory, to measure throughput. `images`: in an epoch."""

    size: int
    classes: int
    images: int

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("data.size", self.size, 8, LARGEST_IMAGE)
        whole("data.classes", self.classes, 2)
        whole("data.images", self.images, 1)


@dataclass(kw_only=True)
class Files(Data):
    """Images in files.

    Args:
        dir: their folder.
        workers: decoding processes a rank, 0 to decode in the rank itself.
        prefetch: batches that each of them decodes ahead.
    """

    dir: str
    workers: int
    prefetch: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("data.workers", self.workers, 0, MOST_WORKERS)
        whole("data.prefetch", self.prefetch, 1)


@dataclass(kw_only=True)
class CIFAR10(Files):
    """60,000 images of 32x32 pixels. `download`: download them where they are missing."""

    download: bool


@dataclass(kw_only=True)
class ImageFolder(Files):
    """Images of any size as dir/train/<class>/* and dir/val/<class>/*, cropped to `size` x `size` pixels."""

    size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("data.size", self.size, 8, LARGEST_IMAGE)


@dataclass(kw_only=True)
class ImageNet(ImageFolder):
    """ILSVRC 2012, laid out as an ImageFolder of 1,000 classes."""


DATA: dict[str, type[Data]] = {
    "digits": Digits,
    "cifar10": CIFAR10,
    "imagenet": ImageNet,
    "imagefolder": ImageFolder,
    "synthetic": Synthetic,
}


@dataclass(kw_only=True)
class Augment:
    """Augmentation of training images (torchvision.transforms.v2), and label smoothing.

    Args:
        interpolation: "bilinear" or "bicubic", of resized images.
        resize: pixels of the shorter side before the center crop of images to validate with; None: 8/7 of the size.
        repeats: repeated augmentation (Hoffer et al. 2020, arXiv 1901.09335; Touvron et al. 2021, arXiv 2012.12877): an
            image is so many times among the batches of all ranks, augmented anew; an epoch has a part of the images.
        crop_and_flip: a random crop, flipped with probability 0.5, in place of the center crop.
        trivial_augment: TrivialAugmentWide (Müller and Hutter 2021, arXiv 2103.10158).
        random_erase: the probability that a rectangle is erased (Zhong et al. 2017, arXiv 1708.04896).
        mixup: alpha of MixUp (Zhang et al. 2017, arXiv 1710.09412); 0 for none.
        cutmix: alpha of CutMix (Yun et al. 2019, arXiv 1905.04899); 0 for none. With both, each batch gets one of them.
        label_smoothing: the share of a label that is distributed over all classes.
    """

    interpolation: str = "bilinear"
    resize: int | None = None
    repeats: int = 1
    crop_and_flip: bool
    trivial_augment: bool
    random_erase: float
    mixup: float
    cutmix: float
    label_smoothing: float

    def __post_init__(self) -> None:
        one_of("augment.interpolation", self.interpolation, ("bilinear", "bicubic"))
        whole("augment.repeats", self.repeats, 1)
        if self.resize is not None:
            whole("augment.resize", self.resize, 8, LARGEST_IMAGE, also="null, or ")
        for option in ("random_erase", "label_smoothing"):
            number(f"augment.{option}", getattr(self, option), 0, 1)
        for option in ("mixup", "cutmix"):
            number(f"augment.{option}", getattr(self, option), 0)
