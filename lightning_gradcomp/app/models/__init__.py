"""Networks for images and for text.

Image networks: some with the package's own stems for small images, and those of torchvision and timm unchanged. Every
function takes the data's channels, classes and image size in pixels, and returns a module:
(batch, channels, size, size) -> logits (batch, classes).

Language models: every function takes the data's vocabulary and context, and returns a module:
int64 tokens (batch, length) -> logits (batch, length, vocabulary).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torchvision
from torch import nn

from lightning_gradcomp.app.models.gpt import GPT
from lightning_gradcomp.app.models.vision import resnet, swin_mini, swin_t
from lightning_gradcomp.errors import refusal

resnet18 = partial(resnet, "resnet18")
resnet50 = partial(resnet, "resnet50")
gpt_mini = partial(GPT, layers=4, width=64, heads=4, positions="learned", tied=False)
gpt_small = partial(GPT, layers=12, width=768, heads=12, positions="learned", tied=True)

NETWORKS = {"resnet18": resnet18, "resnet50": resnet50, "swin_mini": swin_mini, "swin_t": swin_t}

WITH_AUXILIARY = ("googlenet", "inception_v3")
"""torchvision's models with auxiliary classifiers, which are disabled here."""


def of_torchvision(name: str, *, channels: int, classes: int, size: int, **options: Any) -> nn.Module:
    """A torchvision classifier, without pretrained weights."""
    if name not in (names := torchvision.models.list_models(module=torchvision.models)):
        raise refusal("model.name with model=torchvision", name, ", ".join(names))
    if channels != 3:
        allowed = "images of 3 channels, such as data=cifar10; model=resnet18 and swin_mini accept others"
        raise refusal(f"model=torchvision with images of {channels} channel", name, allowed)
    one_loss: dict[str, Any] = {"aux_logits": False, "init_weights": True} if name in WITH_AUXILIARY else {}
    return torchvision.models.get_model(name, weights=None, num_classes=classes, **one_loss, **options)


def of_timm(name: str, *, channels: int, classes: int, size: int, **options: Any) -> nn.Module:
    """A timm model, without pretrained weights."""
    import timm  # pyrefly: ignore[missing-import] - not a dependency

    if not timm.is_model(name):
        raise refusal("model.name with model=timm", name, "one of timm.list_models()")
    return timm.create_model(name, pretrained=False, num_classes=classes, in_chans=channels, **options)
