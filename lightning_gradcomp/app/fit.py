"""What every rank of a run does."""

from __future__ import annotations

import logging
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import OmegaConf

from lightning_gradcomp.app import compose, summary
from lightning_gradcomp.app.ranks import STOPPED
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.plugin import CommunicationMonitor

LOGGERS = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.fabric.utilities.rank_zero",
    "lightning.fabric.utilities.distributed",
)
HIDDEN = (
    "Initializing distributed: ",  # the strategy's own line says how many ranks there are
    f"{'-' * 100}\ndistributed_backend=",
    "Restored all states from ",  # follows "Restoring states from"
    "`Trainer(limit_val_batches=",
    "`Trainer.fit` stopped: ",
    "GPU available: ",  # the summary names the device
    "TPU available: ",
    "HPU available: ",
    "💡 Tip: For seamless cloud ",  # advertises other products
)
HIDDEN_WARNINGS = (
    r".*LeafSpec\(?\)?.* is deprecated",  # inside Lightning 2.6 with torch 2.15, once an epoch
    r".*`torch\.distributed\.\w+` is deprecated",  # the oldest supported torch lacks the new names
    r"The '\w+' does not have many workers",  # the images are in memory
    r"Experiment logs directory .* exists and is not empty",  # it holds config.yaml
    r"You're resuming from a checkpoint that ended before the epoch ended",  # SharedImages skips images already seen
    r"The dirpath has changed from",  # a resumed run has its own folder
    r"Be aware that when using `ckpt_path`, callbacks",  # evaluate=true needs none of them
    r"GPU available but not used",  # trainer.accelerator=cpu
)


def fit(yaml: str) -> dict[str, Any]:
    """Train or validate the composed config `yaml`. Returns the result, which rank 0 writes to the run's folder."""
    hide_messages()
    config: Any = OmegaConf.create(yaml)
    compose.register()
    run = compose.build(config)
    _interrupt_is_sigterm()
    folder, trainer = Path(config.folder), run.trainer
    if config.evaluate:
        trainer.validate(run.task, run.data, ckpt_path=config.ckpt, verbose=False)
        result = summary.evaluation(config, run)
    else:
        start = time.perf_counter()
        # With max_steps, Lightning would leave out the epoch after a finished one when it resumes.
        trainer.fit_loop._iteration_based_training = lambda: False
        try:
            trainer.fit(run.task, run.data, ckpt_path=config.ckpt)
        except SIGTERMException:
            if trainer.is_global_zero:
                print(f"\nstopped after step {trainer.global_step}; to resume: the same command with ckpt={folder}")
            sys.exit(STOPPED)
        seconds = time.perf_counter() - start
        if not run.task.has_trained:
            done = f"; evaluate=true validates {config.ckpt}" if config.ckpt else ""
            raise refusal("steps to train", 0, f"1 or more: a larger trainer.max_epochs, max_steps or max_time{done}")
        if run.task.validated_step != trainer.global_step:  # such as with check_val_every_n_epoch=2 max_epochs=3
            run.task.counts = ()
            trainer.validate(run.task, run.data, verbose=False)
        callbacks: Any = trainer.callbacks  # pyrefly: ignore[missing-attribute] - of Lightning's connector
        [monitor] = [each for each in callbacks if isinstance(each, CommunicationMonitor)]
        result = summary.collect(config, run, monitor.summary(), seconds)
    if trainer.is_global_zero:
        words = run.task.words() if run.task.counts else ("validation", "none, with trainer.limit_val_batches=0")
        summary.write(result, words, folder)
    dist.destroy_process_group()
    return result


def _interrupt_is_sigterm() -> None:
    """Treat a Ctrl-C, which a terminal sends to every process, as a SIGTERM, which ends all ranks after the same step.

    Lightning's handler would end each rank at once.
    """

    def once(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGINT, once)


def hide_messages() -> None:
    """Hide messages of Lightning and torch, `HIDDEN` and `HIDDEN_WARNINGS`, from now on in this process."""
    for message in HIDDEN_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for name in LOGGERS:
        logging.getLogger(name).addFilter(lambda record: not record.getMessage().startswith(HIDDEN))
