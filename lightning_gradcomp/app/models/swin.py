"""Swin Transformers (Liu et al. 2021, arXiv 2103.14030): torchvision's Swin-T, and one for very small images."""

from __future__ import annotations

from typing import Any

import torchvision
from torch import nn
from torchvision.models import SwinTransformer

from lightning_gradcomp.app.data.augment import SMALL
from lightning_gradcomp.errors import refusal


def swin_mini(*, channels: int, classes: int, size: int = 32) -> nn.Module:
    """(batch, channels, height, width) -> logits (batch, classes), for height and width from 8, multiples of 8.

    torchvision's `SwinTransformer` with one token per pixel, two stages of two blocks (48 and 96 wide), and 4x4
    windows: on 8x8 images the first stage has four windows, shifted in its second block, and the second stage one.

    Raises:
        ValueError: if images have more than 64 pixels per side, which would mean thousands of tokens.
    """
    if size > SMALL:
        raise refusal(f"model with images of {size} pixels", "swin_mini", "swin_t, resnet18, resnet50")
    return small_images(1, channels, embed_dim=48, depths=[2, 2], num_heads=[3, 6], num_classes=classes)


def swin_t(*, channels: int, classes: int, size: int) -> nn.Module:
    """(batch, channels, height, width) -> logits (batch, classes): Swin-T, 96 wide, 2 + 2 + 6 + 2 blocks.

    For images of up to 64 pixels, patches are 2x2 pixels instead of 4x4, and windows 4x4 tokens instead of 7x7: a 32x32
    image has 16x16 tokens in the first stage and 2x2 in the last.

    Raises:
        ValueError: if images have fewer than 16 pixels per side, which four stages would reduce to nothing.
    """
    if size > SMALL:
        return torchvision.models.swin_t(weights=None, num_classes=classes)
    if size < 16:
        raise refusal(f"model with images of {size} pixels", "swin_t", "swin_mini, resnet18, resnet50")
    blocks: dict[str, Any] = {"depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24]}
    return small_images(2, channels, embed_dim=96, **blocks, stochastic_depth_prob=0.2, num_classes=classes)


def small_images(patch: int, channels: int, *, embed_dim: int, **options: Any) -> SwinTransformer:
    """A Swin with patches of `patch` x `patch` pixels and windows of 4x4 patches."""
    model = SwinTransformer(patch_size=[patch, patch], embed_dim=embed_dim, window_size=[4, 4], **options)
    stem = model.features[0]
    assert isinstance(stem, nn.Sequential)
    stem[0] = nn.Conv2d(channels, embed_dim, kernel_size=patch, stride=patch)  # torchvision's requires three channels
    return model
