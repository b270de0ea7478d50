"""torchvision's ResNets (He et al. 2015, arXiv 1512.03385), with a stem for small images and any number of channels."""

from __future__ import annotations

import torchvision
from torch import nn

from lightning_gradcomp.app.data.augment import SMALL
from lightning_gradcomp.errors import refusal


def resnet(name: str, *, channels: int, classes: int, size: int = 32, stem: str = "auto") -> nn.Module:
    """`resnet18` or `resnet50`: (batch, channels, height, width) -> logits (batch, classes).

    The ImageNet stem, a 7x7 convolution with stride 2 and pooling, would shrink an 8x8 image to 2x2 positions before
    the first block. The small stem, usual for CIFAR, is a 3x3 convolution with stride 1 and no pooling: it computes
    sixteen times as much. Stems have the images' number of channels, since repeating grey images three times would add
    nothing.

    Args:
        stem: "small" or "imagenet". "auto": small for images of up to 64 pixels.
    """
    if stem not in ("auto", "small", "imagenet"):
        raise refusal("model.stem", stem, "auto, small, imagenet")
    small = stem == "small" or (stem == "auto" and size <= SMALL)
    kernel, stride = (3, 1) if small else (7, 2)
    first = nn.Conv2d(channels, 64, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")  # like torchvision's others
    model = torchvision.models.get_model(name, weights=None, num_classes=classes)
    model.conv1 = first
    if small:
        model.maxpool = nn.Identity()
    return model
