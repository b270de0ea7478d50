"""Networks by name, with stems for small images."""

from __future__ import annotations

from torch import nn

from lightning_gradcomp.app.models.resnet import resnet
from lightning_gradcomp.app.models.swin import swin_mini, swin_t


def build(name: str, *, channels: int, classes: int, size: int = 32) -> nn.Module:
    """The network `name`, one of `MODELS`: (batch, channels, size, size) -> logits (batch, classes).

    Up to 64 pixels the stems are those for small images.

    Raises:
        ValueError: a network that images of this size are too large, or too small, for.
    """
    if name == "swin_mini":
        return swin_mini(channels=channels, classes=classes, size=size)
    if name == "swin_t":
        return swin_t(channels=channels, classes=classes, size=size)
    return resnet(name, channels=channels, classes=classes, size=size)
