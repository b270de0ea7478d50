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
from lightning_gradcomp.plugin import CommunicationMonitor

STOPPED = 143
"""The shell's exit code for a SIGTERM."""

ADVERTISED = ("💡 Tip: For seamless cloud ", "GPU available: ", "TPU available: ", "HPU available: ")
"""Lines of Lightning's that are about other products, or that the summary repeats."""
WARNED = (
    r".*LeafSpec\(?\)?.* is deprecated",  # inside Lightning 2.6 with torch 2.15, once an epoch
    r".*`torch\.distributed\.\w+` is deprecated",  # torch 2.14 has new names, which the oldest supported torch lacks
    r"The '\w+' does not have many workers",  # the images are in memory already
    r"You're resuming from a checkpoint that ended before the epoch ended",  # SharedImages skips what was seen
)


def fit(yaml: str) -> dict[str, Any]:
    """Trains, or validates, the composed config `yaml`. Returns the result, which rank 0 has written to its folder.

    Raises:
        ValueError: an option that is refused once the ranks know each other.
    """
    _quieten()
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
        try:
            trainer.fit(run.task, run.data, ckpt_path=config.ckpt)
        except SIGTERMException:
            if trainer.is_global_zero:
                print(f"\nstopped after step {trainer.global_step}; to resume: the same words, and ckpt={folder}")
            sys.exit(STOPPED)
        seconds = time.perf_counter() - start
        if not run.task.images:  # stopped at the last step, before its validation
            sys.exit(f"gradcomp: {config.ckpt} has completed all steps; for more, raise trainer.max_epochs")
        if trainer.checkpoint_callbacks:
            trainer.save_checkpoint(folder / compose.LAST, weights_only=False)
        [monitor] = [each for each in trainer.callbacks if isinstance(each, CommunicationMonitor)]
        result = summary.collect(config, run, monitor.summary(), seconds)
    if trainer.is_global_zero:
        summary.write(result, folder)
    dist.destroy_process_group()
    return result


def _quieten() -> None:
    for message in WARNED:
        warnings.filterwarnings("ignore", message=message)
    for part in ("pytorch", "fabric"):
        logger = logging.getLogger(f"lightning.{part}.utilities.rank_zero")
        logger.addFilter(lambda record: not record.getMessage().startswith(ADVERTISED))


def _interrupt_is_sigterm() -> None:
    """Treats a Ctrl-C, which a terminal sends to every process, as a SIGTERM, which the strategies share among all ranks;
    Lightning's handler would end each rank at once."""

    def once(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGINT, once)
