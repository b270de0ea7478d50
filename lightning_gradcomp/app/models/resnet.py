"""torchvision's ResNets (He et al. 2015, arXiv 1512.03385), with a stem for images of 8 to 64 pixels."""

from __future__ import annotations

import torchvision
from torch import nn

from lightning_gradcomp.app.data.augment import SMALL


def resnet(name: str, *, channels: int, classes: int, size: int = 32) -> nn.Module:
    """`resnet18` or `resnet50`: (batch, channels, height, width) -> logits (batch, classes).

    The ImageNet stem makes 2x2 positions of an 8x8 image before the first block. In its place, as usual for CIFAR:
    a 3x3 convolution with stride 1, and no pooling. It takes as many channels as the images have, since grey images
    repeated three times would hold nothing new.
    """
    if size > SMALL:
        return torchvision.models.get_model(name, weights=None, num_classes=classes)
    stem = nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's others
    model = torchvision.models.get_model(name, weights=None, num_classes=classes)
    model.conv1, model.maxpool = stem, nn.Identity()
    return model
