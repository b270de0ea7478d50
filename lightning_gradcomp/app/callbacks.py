"""Lightning callbacks of a training run: the progress bar, the state of random generators, a checkpoint on SIGTERM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_gradcomp.app.sizes import digits, human

SHORT = {"train_loss": "loss", "val_acc": "acc"}


class ProgressBar(TQDMProgressBar):
    """Lightning's bar in 100 columns: one for training, and its metrics short.

    CommunicationMonitor's two metrics are one, bytes a step and how many times fewer than dense: `sent=101 kB (441x)`.
    """

    BAR_FORMAT = "{desc} |{bar}| {n_fmt}/{total_fmt}, {remaining} left, {rate_noinv_fmt}{postfix}"

    def init_validation_tqdm(self) -> Tqdm:
        """A bar of its own only where nothing is trained."""
        return super().init_validation_tqdm() if self.trainer.state.fn == TrainerFn.VALIDATING else Tqdm(disable=True)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics: dict[str, Any] = {**super().get_metrics(trainer, pl_module)}
        for name in ("v_num", "val_loss"):  # a run's folder has no version; the validation loss is in metrics.csv
            metrics.pop(name, None)
        metrics = {SHORT.get(name, name): value for name, value in metrics.items()}
        ratio = next((name for name in metrics if name.startswith("ratio(N=")), None)
        if ratio is None or "sent_MB" not in metrics:
            return metrics
        sent, times = human(1e6 * float(metrics.pop("sent_MB"))), float(metrics.pop(ratio))
        return {**metrics, "sent": f"{sent} ({digits(times)}x)"}


class RandomState(Callback):
    """Saves the state of torch's generators in checkpoints, so that stochastic depth and mixed images resume exactly.

    The state is rank 0's, which is that of all ranks: one seed, and as many steps. On a GPU, the generator of each
    rank's own device is set to it.
    """

    def __init__(self) -> None:
        self._saved: dict[str, torch.Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        """The present state: uint8 tensors."""
        cuda = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {}
        return {"cpu": torch.get_rng_state(), **cuda}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training begins: setting up draws random numbers too."""
        self._saved = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._saved:
            torch.set_rng_state(self._saved["cpu"].cpu())
        if "cuda" in self._saved and trainer.strategy.root_device.type == "cuda":
            torch.cuda.set_rng_state(self._saved["cuda"].cpu())


class SaveOnSigterm(Callback):
    """Writes a checkpoint where a SIGTERM has ended the run: after a whole step, on all ranks together."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> Any:
        if isinstance(exception, SIGTERMException):
            trainer.save_checkpoint(self.path, weights_only=False)
