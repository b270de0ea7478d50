"""Networks by name, with stems for small images; those of other libraries, and your own, as they are."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_gradcomp.app.models.resnet import resnet
from lightning_gradcomp.app.models.swin import swin_mini, swin_t
from lightning_gradcomp.app.options.training import Model
from lightning_gradcomp.errors import refusal

WITH_AUXILIARY = ("googlenet", "inception_v3")
"""torchvision's models with auxiliary classifiers, which are left out here."""


def build(model: Model | str, *, channels: int, classes: int, size: int = 32) -> nn.Module:
    """The network of `model`: (batch, channels, size, size) -> logits (batch, classes). A name is one of `MODELS`.

    Raises:
        ValueError: a name that the library doesn't know; a network that these images don't fit; a target that is not
            there, or doesn't take the options.
    """
    model = Model(name=model) if isinstance(model, str) else model
    if model.library is not None:
        try:
            return _of_library(model, channels, classes)
        except TypeError as error:
            allowed = f"keyword arguments of {model.target or model.name}: {error}"
            raise refusal("model.options", model.options, allowed) from error
    if model.name == "swin_mini":
        return swin_mini(channels=channels, classes=classes, size=size)
    if model.name == "swin_t":
        return swin_t(channels=channels, classes=classes, size=size)
    return resnet(model.name, channels=channels, classes=classes, size=size)


def _of_library(model: Model, channels: int, classes: int) -> nn.Module:
    if model.library == "torchvision":
        return _torchvision(model, channels, classes)
    if model.library == "timm":
        return _timm(model, channels, classes)
    assert model.target is not None
    return _imported(model.target)(**model.options)


def _torchvision(model: Model, channels: int, classes: int) -> nn.Module:
    import torchvision

    if model.name not in (names := torchvision.models.list_models(module=torchvision.models)):
        raise refusal("model.name with model=torchvision", model.name, ", ".join(names))
    if channels != 3:
        allowed = "images of 3 channels, such as data=cifar10; model=resnet18 and swin_mini take others"
        raise refusal(f"model=torchvision with images of {channels} channel", model.name, allowed)
    one_loss: dict[str, Any] = {"aux_logits": False, "init_weights": True} if model.name in WITH_AUXILIARY else {}
    return torchvision.models.get_model(model.name, weights=None, num_classes=classes, **one_loss, **model.options)


def _timm(model: Model, channels: int, classes: int) -> nn.Module:
    import timm  # pyrefly: ignore[missing-import] - not a dependency

    if not timm.is_model(model.name):
        raise refusal("model.name with model=timm", model.name, "one of timm.list_models()")
    return timm.create_model(model.name, pretrained=False, num_classes=classes, in_chans=channels, **model.options)


def _imported(target: str) -> Callable[..., nn.Module]:
    """What "module:Name" names, in an installed module or in one of the working folder."""
    module_name, _, name = target.partition(":")
    sys.path.append("")  # the working folder, after what is installed
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and one that it imports is not
        found = None
    if found is None:
        raise refusal("model.target", target, "module:Name of a class that is installed, or in the working folder")
    return found
