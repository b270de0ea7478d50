"""CIFAR-10 (Krizhevsky 2009), read and downloaded by torchvision."""

from __future__ import annotations

from torchvision.datasets import CIFAR10 as Images

from lightning_gradcomp.app.data.augment import Augment
from lightning_gradcomp.app.data.files import Files
from lightning_gradcomp.app.data.shared import Pair

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training images, per channel
FOLDER = "cifar-10-batches-py"
"""The folder's name in torchvision and in the archive."""


class CIFAR10(Files):
    """50,000 training images, and the 10,000 test images for validation; 3x32x32.

    Args:
        batch_size: images per step, over all ranks together.
        dir: holds, or will hold, cifar-10-batches-py/.
        workers: decoding processes per rank.
        prefetch: batches that each of them decodes ahead.
        download: rank 0 downloads the files if they are missing.
        augment: augmentation of the training images.
        seed: seed for the order of the images.
    """

    name, classes = "CIFAR-10", 10
    how_to_get = "Get it with data.download=true, or unpack cifar-10-python.tar.gz of www.cs.toronto.edu/~kriz there"

    def __init__(
        self,
        batch_size: int = 256,
        dir: str = "data",
        workers: int = 2,
        prefetch: int = 2,
        download: bool = True,
        augment: Augment = Augment(),  # noqa: B008 - frozen
        seed: int = 0,
    ) -> None:
        super().__init__(batch_size, dir, 32, workers, prefetch, augment, seed)
        self.download = download

    def check(self) -> None:
        if not (self.download or (self.root / FOLDER).is_dir()):
            raise self.missing(f"there is no folder {FOLDER}")

    def prepare_data(self) -> None:
        """Runs on rank 0 only, while the others wait."""
        if self.download:
            self.fetch(Images)

    def load(self) -> Pair:
        try:
            train = Images(str(self.root), train=True, transform=self.augment.to_train(self.size, MEAN, STD))
            val = Images(str(self.root), train=False, transform=self.augment.to_validate(self.size, MEAN, STD))
        except RuntimeError as error:  # missing, such as on a node that doesn't share rank 0's disk; or damaged
            raise self.missing(f"files are missing or damaged in {FOLDER}") from error
        return train, val
