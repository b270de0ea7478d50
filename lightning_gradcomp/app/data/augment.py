"""Augmentation of training images: torchvision's transforms, in the order of its reference recipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torchvision.transforms import InterpolationMode, v2

from lightning_gradcomp.errors import check_whole, is_number, refusal

SMALL = 64
"""Images of up to this many pixels per side are small: networks use other stems, and crops come from a padded copy."""

Mix = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Images (batch, channels, height, width) and labels int64 (batch) -> images, and float labels (batch, classes)."""


@dataclass(frozen=True, kw_only=True)
class Augment:
    """How training images and their labels are augmented. Options: conf/augment."""

    interpolation: str = "bilinear"
    resize: int | None = None
    repeats: int = 1
    crop_and_flip: bool = False
    trivial_augment: bool = False
    random_erase: float = 0
    mixup: float = 0
    cutmix: float = 0
    label_smoothing: float = 0

    def __post_init__(self) -> None:
        if self.interpolation not in ("bilinear", "bicubic"):
            raise refusal("augment.interpolation", self.interpolation, "bilinear, bicubic")
        check_whole("augment.repeats", self.repeats, 1)
        for option in ("mixup", "cutmix"):
            if not is_number(got := getattr(self, option)) or got < 0:
                raise refusal(f"augment.{option}", got, "0 or more")
        for option in ("random_erase", "label_smoothing"):
            if not is_number(got := getattr(self, option)) or not 0 <= got <= 1:
                raise refusal(f"augment.{option}", got, "0 to 1")

    @property
    def changes_images(self) -> bool:
        """True if training images are transformed one by one."""
        return self.crop_and_flip or self.trivial_augment or self.random_erase > 0

    def check_size(self, size: int) -> None:
        """Raises ValueError if `resize` doesn't fit images of `size` pixels."""
        if self.resize is not None and not SMALL < size <= self.resize:
            small = f"null: images of up to {SMALL} pixels are not cropped"
            allowed = small if size <= SMALL else f"null, or a whole number from data.size={size}"
            raise refusal("augment.resize", self.resize, allowed)

    def check_in_memory(self, data: str) -> None:
        """Raises ValueError if images that are not in files would be transformed."""
        for option in ("resize", "crop_and_flip", "trivial_augment", "random_erase"):
            if got := getattr(self, option):
                raise refusal(f"augment.{option} with {data}", got, "augment=none: its images are not augmented")
        if self.repeats != 1:
            raise refusal(f"augment.repeats with {data}", self.repeats, "1: its images are not augmented")

    def to_train(self, size: int, mean: Sequence[float], std: Sequence[float]) -> v2.Transform:
        """Image -> float tensor (channels, size, size), augmented and normalised per channel."""
        mode = InterpolationMode(self.interpolation)
        steps: list[v2.Transform] = self._center(size)
        if self.crop_and_flip:
            if size <= SMALL:
                steps.append(v2.RandomCrop(size, padding=size // 8))
            else:
                steps = [v2.RandomResizedCrop(size, interpolation=mode)]
            steps.append(v2.RandomHorizontalFlip())
        if self.trivial_augment:
            steps.append(v2.TrivialAugmentWide(interpolation=mode))
        steps += _to_tensor(mean, std)
        if self.random_erase:
            steps.append(v2.RandomErasing(self.random_erase))
        return v2.Compose(steps)

    def to_validate(self, size: int, mean: Sequence[float], std: Sequence[float]) -> v2.Transform:
        """Image -> normalised float tensor (channels, size, size), without augmentation."""
        return v2.Compose([*self._center(size), *_to_tensor(mean, std)])

    def mixer(self, classes: int) -> Mix | None:
        """MixUp or CutMix, chosen at random for each batch if both are on; None for neither."""
        wanted = [(v2.MixUp, self.mixup), (v2.CutMix, self.cutmix)]
        mixes = [cls(alpha=alpha, num_classes=classes) for cls, alpha in wanted if alpha]
        return v2.RandomChoice(mixes) if mixes else None

    def _center(self, size: int) -> list[v2.Transform]:
        """Center crop of 7/8 of the shorter side (He et al. 2015: 224 of 256 pixels), or the whole of a small image."""
        mode = InterpolationMode(self.interpolation)
        if size <= SMALL:
            return [v2.Resize((size, size), mode)]
        return [v2.Resize(self.resize or round(size * 8 / 7), mode), v2.CenterCrop(size)]


def _to_tensor(mean: Sequence[float], std: Sequence[float]) -> list[v2.Transform]:
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
