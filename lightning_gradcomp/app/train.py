"""The training process: `gradcomp_command.py --process train FOLDER` trains the run of FOLDER's config.yaml.

There is no Hydra here. Lightning runs this command again for every further rank.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_gradcomp.app import run_folder, sharding, summary
from lightning_gradcomp.app.classifier import Classifier
from lightning_gradcomp.app.config import HSDP, Run
from lightning_gradcomp.app.data.choose import choose, stand_in
from lightning_gradcomp.app.data.shared import SharedImages
from lightning_gradcomp.app.data.source import Source
from lightning_gradcomp.app.data.transforms import mixer
from lightning_gradcomp.app.models import build as build_model
from lightning_gradcomp.app.processes import devices, hide_known_messages
from lightning_gradcomp.app.trainer import LAST, build_trainer, keeps
from lightning_gradcomp.errors import Refused
from lightning_gradcomp.plugin import CommunicationMonitor

DRY_BATCH = 2
"""Images a rank and step in a dry run."""

STOPPED = 143
"""The shell's exit code for a SIGTERM."""


def main() -> None:
    """Train, or evaluate; at the end rank 0 writes the result and prints a summary."""
    folder = Path(sys.argv[-1])
    hide_known_messages()
    run = run_folder.load(folder)
    L.seed_everything(run.seed, workers=True, verbose=False)
    try:
        parts = build(run, folder)
    except (ValueError, MisconfigurationException) as error:
        sys.exit(f"gradcomp: {error}")
    try:
        (evaluate if run.evaluate else train)(run, folder, parts)
    except Refused as error:
        sys.exit(f"gradcomp: {error}")
    dist.destroy_process_group()


class Parts(NamedTuple):
    """The objects of a run."""

    classifier: Classifier
    data: SharedImages
    trainer: L.Trainer
    monitor: CommunicationMonitor


def build(run: Run, folder: Path) -> Parts:
    """The network, the images and the Trainer of `run`.

    Raises:
        ValueError, MisconfigurationException: an option that is refused on this machine.
    """
    placed = devices(run.trainer)
    ranks = placed[1] * placed[2]
    dry = DRY_BATCH * ranks
    source = stand_in(run.data, 2 * dry) if run.dry_run else choose(run.data, run.augment)
    batch_size = dry if run.dry_run else run.data.batch_size
    data = SharedImages(source, batch_size=batch_size, ranks=ranks, seed=run.seed, repeats=run.augment.repeats)
    if source.dirichlet is not None and not run.evaluate:
        data.setup("fit")  # a split that can't be drawn is refused here, before the other ranks start
    monitor = CommunicationMonitor()
    return Parts(classifier_of(run, source), data, build_trainer(run, folder, monitor, placed), monitor)


def classifier_of(run: Run, source: Source) -> Classifier:
    """The network of `run`, for the images of `source`.

    Raises:
        ValueError: a network that they don't fit.
    """
    network = build_model(run.model, channels=source.channels, classes=source.classes, size=source.size)
    if run.trainer.channels_last:
        network.to(memory_format=torch.channels_last)
    mix = mixer(run.augment, source.classes)
    smoothing, channels_last = run.augment.label_smoothing, run.trainer.channels_last
    options = (network, run.optimizer, mix, smoothing, channels_last)
    if isinstance(run.strategy, HSDP):
        _, per_node, nodes = devices(run.trainer)
        classifier = sharding.ShardedClassifier(*options, compiled=run.trainer.compile)
        sharding.check(classifier, run.compressor, run.strategy.mesh(nodes, per_node)[1])
        return classifier
    if run.trainer.compile:
        network.compile()
    return Classifier(*options)


def train(run: Run, folder: Path, parts: Parts) -> None:
    """Fit, from the run's checkpoint if it has one; write summary.json, and print a summary."""
    classifier, data, trainer, monitor = parts
    interrupt_is_sigterm()
    start = time.perf_counter()
    try:
        trainer.fit(classifier, data, ckpt_path=run.ckpt)
    except SIGTERMException:
        if trainer.is_global_zero:
            print(f"\nstopped after step {trainer.global_step}; to resume: the same words, and ckpt={folder}")
        sys.exit(STOPPED)
    seconds = time.perf_counter() - start
    if not classifier.images:  # stopped at the last step, before its validation
        steps = f"{run.ckpt} has completed all {trainer.global_step} steps of this run"
        sys.exit(f"gradcomp: {steps}: evaluate=true validates it; for more steps, raise trainer.max_epochs")
    if keeps(run) and not saved(trainer):
        trainer.save_checkpoint(folder / LAST, weights_only=False)
    result = summary.collect(run, trainer, classifier, monitor.summary(), seconds)
    if trainer.is_global_zero:
        summary.write(result, folder)
        print(summary.table(result, folder))


def saved(trainer: L.Trainer) -> bool:
    """Whether last.ckpt is of this step already: ranks need not send what they remember once more."""
    periodic = [made for made in trainer.checkpoint_callbacks if isinstance(made, ModelCheckpoint) and not made.monitor]
    return any(made._last_global_step_saved == trainer.global_step for made in periodic)


def evaluate(run: Run, folder: Path, parts: Parts) -> None:
    """Validate the checkpoint; write evaluation.json, and print the accuracy."""
    classifier, data, trainer, _ = parts
    trainer.validate(classifier, data, ckpt_path=run.ckpt, verbose=False)
    if trainer.is_global_zero:
        summary.write_evaluation(run, classifier, folder)
        print(f"\nvalidation accuracy {summary.accuracy(classifier.correct, classifier.images)} of {run.ckpt}")


def interrupt_is_sigterm() -> None:
    """Treat the first Ctrl-C like a SIGTERM, which the strategies pass on to all ranks; a second one raises.

    A terminal sends it to every process of a run; Lightning's handler would kill the others at once.
    """

    def once(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGINT, once)
