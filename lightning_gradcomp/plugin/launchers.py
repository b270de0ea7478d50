"""Lightning's launchers, with checks before they start processes, and with callbacks' results afterwards.

Private Lightning names used here: `_SubprocessScriptLauncher`, and `_MultiProcessingLauncher`, whose
`get_extra_results` and `update_main_process_results` carry results from rank 0 to the main process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn

KEY = "lightning_gradcomp"
"""Key of the callbacks' results among those that Lightning sends to the main process."""
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

    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        """Like Lightning's, plus the results of callbacks that have `rank_zero_results`."""
        results = [callback.rank_zero_results() for callback in _with_results(trainer)]
        return {**super().get_extra_results(trainer), KEY: results}

    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        """Like Lightning's; then passes each callback in the main process the results of its copy on rank 0."""
        super().update_main_process_results(trainer, extra)
        for callback, results in zip(_with_results(trainer), extra[KEY], strict=False):
            callback.load_rank_zero_results(results)


def _with_results(trainer: Trainer) -> list[Any]:
    every: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in every if hasattr(callback, "rank_zero_results")]
