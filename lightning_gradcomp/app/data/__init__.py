"""Data sets of images and of text as LightningDataModules."""

from lightning_gradcomp.app.data.augment import Augment
from lightning_gradcomp.app.data.digits import Digits
from lightning_gradcomp.app.data.files import CIFAR10, FashionMNIST, ImageFolder, ImageNet
from lightning_gradcomp.app.data.images import SharedImages, Synthetic
from lightning_gradcomp.app.data.shared import SharedData
from lightning_gradcomp.app.data.text import SharedTokens, Text

__all__ = [
    "CIFAR10",
    "Augment",
    "Digits",
    "FashionMNIST",
    "ImageFolder",
    "ImageNet",
    "SharedData",
    "SharedImages",
    "SharedTokens",
    "Synthetic",
    "Text",
]
