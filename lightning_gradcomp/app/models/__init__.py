"""Networks by name, with stems for small images."""

from __future__ import annotations

from torch import nn

from lightning_gradcomp.app.models.resnet import resnet
from lightning_gradcomp.app.models.swin import swin_mini


def build(name: str, *, channels: int, classes: int) -> nn.Module:
    """The network `name`, one of `config.MODELS`: (batch, channels, height, width) -> logits (batch, classes)."""
    if name == "swin_mini":
        return swin_mini(channels=channels, classes=classes)
    return resnet(name, channels=channels, classes=classes)
