"""Lightning callbacks of a training run: the progress bar, random draws, a checkpoint on SIGTERM."""

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
from lightning_gradcomp.compressors.kernels.rng import seed_of

SHORT = {"train_loss": "loss", "val_acc": "acc"}


class ProgressBar(TQDMProgressBar):
    """Lightning's bar in 100 columns: one for training, and its metrics short.

    CommunicationMonitor's two metrics are one, bytes a step and how many times fewer than dense: `sent=101 kB (441x)`.
    """

    BAR_FORMAT = "{desc} |{bar}| {n_fmt}/{total_fmt}, {remaining} left, {rate_noinv_fmt}{postfix}"

    def on_train_start(self, *_: Any) -> None:
        """A run that resumes amid an epoch has no start of one, at which the bar would get its name and length."""
        super().on_train_start()
        self.on_train_epoch_start(self.trainer)

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


class SeedEachStep(Callback):
    """What a step draws, such as MixUp's shares and dropped paths, is a function of (seed, rank, epoch, batch).

    So ranks draw different numbers, and a resumed run those that it would have drawn: there is no state to save.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(seed_of(self.seed, trainer.global_rank, trainer.current_epoch, batch_idx))


class SaveOnSigterm(Callback):
    """Writes a checkpoint where a SIGTERM has ended the run: after a whole step, on all ranks together."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> Any:
        if isinstance(exception, SIGTERMException):
            trainer.save_checkpoint(self.path, weights_only=False)
