"""Data sets whose images are files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, ClassVar

from lightning_gradcomp.app.data.augment import Augment
from lightning_gradcomp.app.data.images import SharedImages
from lightning_gradcomp.app.data.missing import MissingData, missing


class Files(SharedImages):
    """Images in files below a folder.

    Args:
        batch_size: images per step, over all ranks together.
        dir: the folder.
        size: pixels per side of the network's input.
        workers: decoding processes per rank; 0 decodes in the rank itself.
        prefetch: batches that each of them decodes ahead.
        augment: augmentation of the training images.
        seed: seed for the order of the images.
    """

    channels = 3
    how_to_get: ClassVar[str]

    def __init__(
        self,
        batch_size: int,
        dir: str,
        size: int,
        workers: int = 2,
        prefetch: int = 2,
        augment: Augment = Augment(),  # noqa: B008 - frozen
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, augment, seed, workers, prefetch)
        augment.check_size(size)
        self.root, self.size = Path(dir).expanduser(), size

    def fetch(self, images: Callable[..., Any]) -> None:
        """Download with a data set of torchvision, below the folder.

        Raises:
            MissingData: if that fails.
        """
        try:
            with redirect_stdout(sys.stderr):  # the text of the progress bar
                images(str(self.root), download=True)
        except (OSError, RuntimeError) as error:  # no network, a full disk; a damaged file
            raise self.missing(f"the download failed: {' '.join(str(error).split())}") from error

    def missing(self, why: str) -> MissingData:
        """The error for files that can't be used: why, where they were looked for, how to get them."""
        option = "data.dir, or the environment's GRADCOMP_DATA"
        return missing(self.name, why, self.root, option, self.how_to_get)
