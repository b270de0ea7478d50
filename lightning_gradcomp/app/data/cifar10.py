"""CIFAR-10 (Krizhevsky 2009), read and downloaded by torchvision."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path

from torchvision.datasets import CIFAR10 as Images

from lightning_gradcomp.app.data.missing import CIFAR10_FOLDER, missing
from lightning_gradcomp.app.data.source import Pair, Source
from lightning_gradcomp.app.data.transforms import to_train, to_validate
from lightning_gradcomp.app.options.data import CIFAR10, Augment

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training images, by channel
SIZE, CLASSES, IMAGES = 32, 10, 50_000


def cifar10(options: CIFAR10, augment: Augment) -> Source:
    """50,000 images to train with, and the 10,000 of the test set to validate with; 3x32x32."""
    root = Path(options.dir).expanduser()

    def download() -> None:
        if options.download:
            try:
                with redirect_stdout(sys.stderr):  # the text of the progress bar
                    Images(str(root), download=True)
            except (OSError, RuntimeError) as error:  # no network, a full disk; a damaged file
                raise missing(options, f"the download failed: {error}") from error

    def load() -> Pair:
        try:
            train = Images(str(root), train=True, transform=to_train(augment, SIZE, MEAN, STD))
            return train, Images(str(root), train=False, transform=to_validate(augment, SIZE, MEAN, STD))
        except RuntimeError as error:  # missing, such as on a node that doesn't share rank 0's disk; or damaged
            raise missing(options, f"files are missing or damaged in {CIFAR10_FOLDER}") from error

    workers, prefetch = options.workers, options.prefetch
    return Source(3, SIZE, CLASSES, load, images=IMAGES, prepare=download, workers=workers, prefetch=prefetch)
