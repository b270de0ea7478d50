"""What a server and its workers make of a run's options, each for itself."""

from __future__ import annotations

import json
from dataclasses import asdict

import lightning as L
import torch

from lightning_gradcomp.app.classifier import Classifier, build_optimizer
from lightning_gradcomp.app.config import Run, name_of
from lightning_gradcomp.app.data.choose import choose
from lightning_gradcomp.app.data.shared import SharedImages
from lightning_gradcomp.app.processes import devices
from lightning_gradcomp.app.train import classifier_of

ITS_OWN = ("dir", "workers", "prefetch", "download")
"""Options of the data in which a worker may differ from the server."""


class AsyncJob:
    """The network, its optimizer, the images, and how much is to be done.

    Args:
        run: its options; `trainer.devices` is the number of workers that it is planned for, N.

    Raises:
        ValueError: an option that can't be honoured.
    """

    def __init__(self, run: Run) -> None:
        L.seed_everything(run.seed, workers=True, verbose=False)
        _, self.workers, _ = devices(run.trainer)
        source = choose(run.data, run.augment)
        self.data = SharedImages(source, batch_size=run.data.batch_size, ranks=self.workers, seed=run.seed)
        self.data.prepare_data()
        self.data.setup("fit")
        steps = len(self.data.train) // run.data.batch_size  # pyrefly: ignore[bad-argument-type]
        self.epoch_steps = min(steps, run.trainer.limit_train_batches or steps)
        self.pushes = run.trainer.max_epochs * self.epoch_steps * self.workers
        """Of a whole run: so many gradients as N ranks compute in its epochs."""
        self.classifier: Classifier = classifier_of(run, source)
        options, steps = run.optimizer, self.pushes // self.workers
        peak, warmup = options.peak(run.data.batch_size), options.warmup(self.epoch_steps)
        self.optimizer, schedule = build_optimizer(options, self.classifier, peak, warmup, steps)
        self._factor = schedule.lr_lambdas[0]
        images = {option: value for option, value in asdict(run.data).items() if option not in ITS_OWN}
        clip, augment = run.trainer.gradient_clip_val, asdict(run.augment)
        said = [name_of("data", run.data), images, augment, self.workers, self.pushes, asdict(options), clip]
        self.identity = json.dumps(said)
        """What workers and server must have alike, besides what they check in any case."""

    def set_rates(self, pushes: int) -> None:
        """The schedule's learning rates after so many pushes of all workers: N are a step."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self._factor(min(pushes, self.pushes) // self.workers)


def device_of(run: Run) -> torch.device:
    """Where a worker computes."""
    return torch.device(devices(run.trainer)[0])
