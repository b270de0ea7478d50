"""A Swin Transformer (Liu et al. 2021, arXiv 2103.14030) small enough for small images."""

from __future__ import annotations

from torch import nn
from torchvision.models import SwinTransformer


def swin_mini(*, channels: int, classes: int) -> nn.Module:
    """(batch, channels, height, width) -> logits (batch, classes), for height and width from 8, multiples of 8.

    torchvision's `SwinTransformer` with a token a pixel and two stages of two blocks (48 and 96 wide), windows of 4x4:
    on 8x8 images the first stage has four windows, shifted in its second block, and the second stage one.
    """
    model = SwinTransformer(
        patch_size=[1, 1], embed_dim=48, depths=[2, 2], num_heads=[3, 6], window_size=[4, 4], num_classes=classes
    )
    stem = model.features[0]
    assert isinstance(stem, nn.Sequential)
    stem[0] = nn.Conv2d(channels, 48, kernel_size=1)  # torchvision's takes three channels
    return model
