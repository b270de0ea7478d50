"""CIFAR-10 (Krizhevsky 2009) as torchvision reads and fetches it."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path

from torchvision.datasets import CIFAR10 as Pictures

from lightning_gradcomp.app.data.missing import CIFAR10_FOLDER, missing
from lightning_gradcomp.app.data.source import Pair, Source
from lightning_gradcomp.app.data.transforms import to_train, to_validate
from lightning_gradcomp.app.options.data import CIFAR10, Augment

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training pictures, by channel
SIZE, CLASSES, IMAGES = 32, 10, 50_000


def cifar10(options: CIFAR10, augment: Augment) -> Source:
    """50,000 pictures to train with, and the test set's 10,000 to validate with; 3x32x32."""
    root = Path(options.dir).expanduser()

    def fetch() -> None:
        if options.download:
            try:
                with redirect_stdout(sys.stderr):  # the progress bar's words
                    Pictures(str(root), download=True)
            except (OSError, RuntimeError) as error:  # no network, a full disk; a file that came broken
                raise missing(options, f"the download failed: {error}") from error

    def load() -> Pair:
        try:
            train = Pictures(str(root), train=True, transform=to_train(augment, SIZE, MEAN, STD))
            return train, Pictures(str(root), train=False, transform=to_validate(SIZE, MEAN, STD))
        except RuntimeError as error:  # not there, such as on a node that doesn't share rank 0's disk; or broken
            raise missing(options, f"files are missing or damaged in {CIFAR10_FOLDER}") from error

    return Source(3, SIZE, CLASSES, load, images=IMAGES, prepare=fetch, workers=options.workers)
