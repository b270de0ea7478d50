"""Which images, from where, and what is done to those that are trained on."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gradcomp.app.options.limits import at_least, share

SMALL = 64
"""Pixels of an image up to which it is a small one: networks have other stems, and crops come from a padded copy."""


@dataclass(kw_only=True, slots=True)
class Data:
    """The images. `batch_size`: images a step over all ranks together, before accumulation."""

    batch_size: int

    def __post_init__(self) -> None:
        at_least("data.batch_size", self.batch_size, 1)


@dataclass(kw_only=True, slots=True)
class Digits(Data):
    """Handwritten digits of 8x8 pixels, in memory."""


@dataclass(kw_only=True, slots=True)
class Synthetic(Data):
    """Random pixels, in memory, to measure throughput with: there is nothing to learn."""

    size: int
    classes: int
    images: int

    def __post_init__(self) -> None:
        super(Synthetic, self).__post_init__()
        at_least("data.size", self.size, 8)
        at_least("data.classes", self.classes, 2)
        at_least("data.images", self.images, 1)


@dataclass(kw_only=True, slots=True)
class Files(Data):
    """Pictures in files. `dir`: their folder; `workers`: processes that decode for each rank, 0 for the rank itself."""

    dir: str
    workers: int

    def __post_init__(self) -> None:
        super(Files, self).__post_init__()
        at_least("data.workers", self.workers, 0)


@dataclass(kw_only=True, slots=True)
class CIFAR10(Files):
    """60,000 pictures of 32x32 pixels. `download`: fetch them where they are missing."""

    download: bool


@dataclass(kw_only=True, slots=True)
class ImageFolder(Files):
    """Pictures of any size as dir/train/<class>/* and dir/val/<class>/*, cut to `size` x `size` pixels."""

    size: int

    def __post_init__(self) -> None:
        super(ImageFolder, self).__post_init__()
        at_least("data.size", self.size, 8)


@dataclass(kw_only=True, slots=True)
class ImageNet(ImageFolder):
    """ILSVRC 2012, laid out as an ImageFolder of 1,000 classes."""


DATA: dict[str, type[Data]] = {
    "digits": Digits,
    "cifar10": CIFAR10,
    "imagenet": ImageNet,
    "imagefolder": ImageFolder,
    "synthetic": Synthetic,
}


@dataclass(kw_only=True, slots=True)
class Augment:
    """What happens to training images (torchvision.transforms.v2), and how sure the labels are.

    Args:
        crop_and_flip: a random crop, mirrored half of the time, in place of the middle.
        trivial_augment: TrivialAugmentWide (Müller and Hutter 2021, arXiv 2103.10158).
        random_erase: the probability that a rectangle is blanked (Zhong et al. 2017, arXiv 1708.04896).
        mixup: alpha of MixUp (Zhang et al. 2017, arXiv 1710.09412); 0 for none.
        cutmix: alpha of CutMix (Yun et al. 2019, arXiv 1905.04899); 0 for none. With both, each batch gets one of them.
        label_smoothing: the share of a label that is spread over all classes.
    """

    crop_and_flip: bool
    trivial_augment: bool
    random_erase: float
    mixup: float
    cutmix: float
    label_smoothing: float

    def __post_init__(self) -> None:
        for option in ("random_erase", "label_smoothing"):
            share(f"augment.{option}", getattr(self, option))
        for option in ("mixup", "cutmix"):
            at_least(f"augment.{option}", getattr(self, option), 0)
