"""Ctrl-C: all ranks end after the same step, with a checkpoint to go on from; a second one ends them at once."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException


def interrupt_is_sigterm() -> None:
    """Treat the first Ctrl-C like a SIGTERM, which the strategies let all ranks know of.

    A terminal sends it to every process of a run; Lightning's answer to it is to kill the others at once.
    """

    def once(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGINT, once)


class SaveWhenStopped(Callback):
    """Writes a checkpoint where a SIGTERM has ended the run: after a whole step, on all ranks together."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> Any:
        if isinstance(exception, SIGTERMException):
            trainer.save_checkpoint(self.path, weights_only=False)
