"""Lightning's launchers, with checks before they start processes.

Private Lightning names used here: `_SubprocessScriptLauncher` and `_MultiProcessingLauncher`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn

Check = Callable[[Trainer, LightningModule], None]


class _Checked:
    """A launcher that calls `check(trainer, module)` before it launches a fit."""

    def __init__(self, check: Check, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.check = check

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            self.check(trainer, trainer.lightning_module)
        return super().launch(function, *args, trainer=trainer, **kwargs)  # type: ignore[misc]


class SubprocessLauncher(_Checked, _SubprocessScriptLauncher):
    """The launcher for start_method="popen"."""


class MultiProcessingLauncher(_Checked, _MultiProcessingLauncher):
    """The launcher for start_method="spawn", "fork" or "forkserver"."""
