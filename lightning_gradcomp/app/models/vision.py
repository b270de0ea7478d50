"""torchvision's networks, for images of any number of channels, and with stems for small images.

ResNets: He et al. 2015, arXiv 1512.03385. Swin Transformers: Liu et al. 2021, arXiv 2103.14030.
"""

from __future__ import annotations

from typing import Any

import torchvision
from torch import nn
from torchvision.models import SwinTransformer

from lightning_gradcomp.app.data.augment import SMALL
from lightning_gradcomp.errors import refusal


def resnet(name: str, *, channels: int, classes: int, size: int = 32, stem: str = "auto") -> nn.Module:
    """`resnet18` or `resnet50`: (batch, channels, height, width) -> logits (batch, classes).

    The ImageNet stem, a 7x7 convolution with stride 2 and pooling, would shrink an 8x8 image to 2x2 positions before
    the first block. The small stem, usual for CIFAR, is a 3x3 convolution with stride 1 and no pooling: it computes
    sixteen times as much. Stems have the images' number of channels, since repeating grey images three times would add
    nothing.
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


def swin_mini(*, channels: int, classes: int, size: int = 32, patch: int = 1, window: int = 4) -> nn.Module:
    """(batch, channels, height, width) -> logits (batch, classes), for images of 8 to 64 pixels per side.

    torchvision's `SwinTransformer` with two stages of two blocks (48 and 96 wide). On 8x8 images, with one token per
    pixel and 4x4 windows, the first stage has four windows, shifted in its second block, and the second stage one. So
    it is on 28x28 images with patches of 2x2 pixels and 7x7 windows. Other sizes are padded to whole windows.
    """
    if size > SMALL:
        raise refusal(f"model with images of {size} pixels", "swin_mini", "swin_t, resnet18, resnet50")
    for option, got in (("patch", patch), ("window", window)):
        if type(got) is not int or not 1 <= got <= size:
            raise refusal(f"model.{option}", got, f"a whole number from 1 to {size} (data.size)")
    blocks: dict[str, Any] = {"depths": [2, 2], "num_heads": [3, 6]}
    return small_images(patch, window, channels, embed_dim=48, **blocks, num_classes=classes)


def swin_t(*, channels: int, classes: int, size: int) -> nn.Module:
    """(batch, channels, height, width) -> logits (batch, classes): Swin-T, 96 wide, 2 + 2 + 6 + 2 blocks.

    For images of up to 64 pixels, patches are 2x2 pixels instead of 4x4, and windows 4x4 tokens instead of 7x7: a 32x32
    image has 16x16 tokens in the first stage and 2x2 in the last.
    """
    if size > SMALL:
        return torchvision.models.swin_t(weights=None, num_classes=classes)
    if size < 16:
        raise refusal(f"model with images of {size} pixels", "swin_t", "swin_mini, resnet18, resnet50")
    blocks: dict[str, Any] = {"depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24]}
    return small_images(2, 4, channels, embed_dim=96, **blocks, stochastic_depth_prob=0.2, num_classes=classes)


def small_images(patch: int, window: int, channels: int, *, embed_dim: int, **options: Any) -> SwinTransformer:
    """A Swin with patches of `patch` x `patch` pixels and windows of `window` x `window` patches."""
    model = SwinTransformer(patch_size=[patch] * 2, embed_dim=embed_dim, window_size=[window] * 2, **options)
    stem = model.features[0]
    assert isinstance(stem, nn.Sequential)
    stem[0] = nn.Conv2d(channels, embed_dim, kernel_size=patch, stride=patch)  # torchvision's requires three channels
    return model
