"""1,797 handwritten digits of 8x8 pixels, real and bundled with scikit-learn (UCI; Alpaydin and Kaynak 1998)."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold, train_test_split
from torch.utils.data import TensorDataset

from lightning_gradcomp.app.data.augment import Augment
from lightning_gradcomp.app.data.images import SharedImages
from lightning_gradcomp.app.data.shared import Pair
from lightning_gradcomp.errors import refusal

CHANNELS = 1
CLASSES = 10
VALIDATION = 360
FOLDS = 5
SPLIT_SEED = 0  # a constant: runs with different seeds are validated on the same images


def digits(fold: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """1,437 training and 360 validation images, stratified: float (n, 1, 8, 8) and labels int64 (n).

    The images have mean 0 and variance 1 over all pixels of the training part. A `fold`, 0 to 4, is one of a five-fold
    cross-validation; the last three have 359 validation images and 1,438 training images.
    """
    pixels, labels = load_digits(return_X_y=True)
    if fold is None:
        parts = train_test_split(pixels, labels, test_size=VALIDATION, stratify=labels, random_state=SPLIT_SEED)
    else:
        folds = StratifiedKFold(FOLDS, shuffle=True, random_state=SPLIT_SEED)
        train_indices, val_indices = list(folds.split(pixels, labels))[fold]
        parts = [numbers[indices] for numbers in (pixels, labels) for indices in (train_indices, val_indices)]
    train, val = (torch.tensor(part / 16, dtype=torch.float32).view(-1, CHANNELS, 8, 8) for part in parts[:2])
    train_labels, val_labels = (torch.tensor(part, dtype=torch.int64) for part in parts[2:])
    mean, std = train.mean(), train.std()
    return TensorDataset((train - mean) / std, train_labels), TensorDataset((val - mean) / std, val_labels)


class Digits(SharedImages):
    """The digits as a data module. `augment` does not transform the images."""

    name, channels, classes, size = "digits", CHANNELS, CLASSES, 8

    def __init__(
        self,
        batch_size: int = 64,
        fold: int | None = None,
        dirichlet: float | None = None,
        augment: Augment = Augment(),  # noqa: B008 - frozen
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, augment, seed, dirichlet=dirichlet)
        augment.check_in_memory("data=digits")
        if fold not in (None, *range(FOLDS)):
            raise refusal("data.fold", fold, f"null, or a whole number from 0 to {FOLDS - 1}")
        self.fold = fold

    def load(self) -> Pair:
        return digits(self.fold)
