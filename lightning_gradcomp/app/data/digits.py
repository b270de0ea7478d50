"""1,797 handwritten digits of 8x8 pixels, real and bundled with scikit-learn (UCI; Alpaydin and Kaynak 1998)."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from lightning_gradcomp.app.data.source import Source

CHANNELS = 1
CLASSES = 10
IMAGES = 1437
VALIDATION = 360
SPLIT_SEED = 0  # a constant: runs with different seeds are validated on the same images


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images to train with and 360 to validate with, stratified: float (n, 1, 8, 8) and labels int64 (n).

    The images have mean 0 and variance 1 over all pixels of the training part.
    """
    from sklearn.datasets import load_digits  # takes seconds to import, which no other data needs
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels, labels, test_size=VALIDATION, stratify=labels, random_state=SPLIT_SEED)
    train, val = (torch.tensor(part / 16, dtype=torch.float32).view(-1, CHANNELS, 8, 8) for part in parts[:2])
    train_labels, val_labels = (torch.tensor(part, dtype=torch.int64) for part in parts[2:])
    mean, std = train.mean(), train.std()
    return TensorDataset((train - mean) / std, train_labels), TensorDataset((val - mean) / std, val_labels)


def source() -> Source:
    """The digits."""
    return Source(CHANNELS, 8, CLASSES, digits, images=IMAGES)
