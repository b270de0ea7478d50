"""torchvision's ResNets (He et al. 2015, arXiv 1512.03385), with a stem for images of 8 to 64 pixels."""

from __future__ import annotations

import torchvision
from torch import nn

from lightning_gradcomp.app.data.augment import SMALL


def resnet(name: str, *, channels: int, classes: int, size: int = 32) -> nn.Module:
    """`resnet18` or `resnet50`: (batch, channels, height, width) -> logits (batch, classes).

    The ImageNet stem would shrink an 8x8 image to 2x2 positions before the first block. It is replaced, as usual for
    CIFAR, by a 3x3 convolution with stride 1 and no pooling. The new stem has the images' number of channels, since
    repeating grey images three times would add nothing.
    """
    if size > SMALL:
        return torchvision.models.get_model(name, weights=None, num_classes=classes)
    stem = nn.Conv2d(channels, 64, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # like torchvision's others
    model = torchvision.models.get_model(name, weights=None, num_classes=classes)
    model.conv1, model.maxpool = stem, nn.Identity()
    return model
