"""From a decoded image to the input of a network: torchvision's transforms, in the order of its reference recipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torchvision.transforms import InterpolationMode, v2

from lightning_gradcomp.app.options.data import SMALL, Augment

Mix = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Images (batch, channels, height, width) and labels int64 (batch) -> images, and float labels (batch, classes)."""


def to_tensor(mean: Sequence[float], std: Sequence[float]) -> list[v2.Transform]:
    """Image -> float tensor (3, height, width), normalised per channel."""
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]


def center(augment: Augment, size: int) -> list[v2.Transform]:
    """The center crop of 7/8 of the shorter side (He et al. 2015: 224 of 256 pixels), or of what `augment.resize` says;
    all of a small image."""
    interpolation = InterpolationMode(augment.interpolation)
    if size <= SMALL:
        return [v2.Resize((size, size), interpolation)]
    return [v2.Resize(augment.resize or round(size * 8 / 7), interpolation), v2.CenterCrop(size)]


def to_validate(augment: Augment, size: int, mean: Sequence[float], std: Sequence[float]) -> v2.Transform:
    """Without augmentation."""
    return v2.Compose([*center(augment, size), *to_tensor(mean, std)])


def to_train(augment: Augment, size: int, mean: Sequence[float], std: Sequence[float]) -> v2.Transform:
    """With the augmentation that `augment` describes."""
    steps: list[v2.Transform] = center(augment, size)
    if augment.crop_and_flip:
        if size <= SMALL:
            steps.append(v2.RandomCrop(size, padding=size // 8))
        else:
            steps = [v2.RandomResizedCrop(size, interpolation=InterpolationMode(augment.interpolation))]
        steps.append(v2.RandomHorizontalFlip())
    if augment.trivial_augment:
        steps.append(v2.TrivialAugmentWide(interpolation=InterpolationMode(augment.interpolation)))
    steps += to_tensor(mean, std)
    if augment.random_erase:
        steps.append(v2.RandomErasing(augment.random_erase))
    return v2.Compose(steps)


def mixer(augment: Augment, classes: int) -> Mix | None:
    """torchvision's MixUp or CutMix, one of the two at random for each batch; None where neither is wanted."""
    wanted = [(v2.MixUp, augment.mixup), (v2.CutMix, augment.cutmix)]
    mixes = [cls(alpha=alpha, num_classes=classes) for cls, alpha in wanted if alpha]
    return v2.RandomChoice(mixes) if mixes else None
