"""MixUp and CutMix: pairs of training images, and of their labels, become one."""

from __future__ import annotations

from lightning_gradcomp.app.classifier import Mix
from lightning_gradcomp.app.options.data import Augment


def mixer(augment: Augment, classes: int) -> Mix | None:
    """torchvision's, one of the two at random for each batch; None where neither is wanted.

    From images (batch, channels, height, width) and labels int64 (batch) to images and shares float (batch, classes).
    """
    from torchvision.transforms import v2  # of the extra `recipes`

    wanted = [(v2.MixUp, augment.mixup), (v2.CutMix, augment.cutmix)]
    ways = [way(alpha=alpha, num_classes=classes) for way, alpha in wanted if alpha]
    return v2.RandomChoice(ways) if ways else None
