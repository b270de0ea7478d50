"""`python -m lightning_gradcomp.app.train FOLDER`: train the run that config.yaml in FOLDER describes.

There is no Hydra here. Lightning starts this command again for every further rank.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import lightning as L
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lightning_gradcomp.app import devices, runfile, summary
from lightning_gradcomp.app.classifier import Classifier
from lightning_gradcomp.app.config import DGA, Run
from lightning_gradcomp.app.data.digits import CHANNELS, CLASSES, digits
from lightning_gradcomp.app.data.shared import SharedImages
from lightning_gradcomp.app.models import build as build_model
from lightning_gradcomp.app.quiet import quiet
from lightning_gradcomp.plugin.callbacks import CommunicationMonitor
from lightning_gradcomp.plugin.delayed import DelayedStrategy
from lightning_gradcomp.plugin.strategy import CompressedDDPStrategy


def main() -> None:
    """Train; at the end rank 0 writes summary.json and prints its short form."""
    folder = Path(sys.argv[1])
    quiet()
    run = runfile.load(folder)
    L.seed_everything(run.seed, workers=True, verbose=False)
    monitor = CommunicationMonitor()
    try:
        data, trainer = build(run, folder, monitor)
    except (ValueError, MisconfigurationException) as error:
        sys.exit(f"gradcomp: {error}")
    classifier = Classifier(build_model(run.model.name, channels=CHANNELS, classes=CLASSES), run.optimizer)
    start = time.perf_counter()
    trainer.fit(classifier, data)
    seconds = time.perf_counter() - start
    trainer.save_checkpoint(folder / "checkpoints" / "last.ckpt", weights_only=False)
    result = summary.collect(run, trainer, classifier, monitor.summary(), seconds)
    if trainer.is_global_zero:
        summary.write(result, folder)
        print(summary.table(result, folder))
    dist.destroy_process_group()


def build(run: Run, folder: Path, monitor: CommunicationMonitor) -> tuple[SharedImages, L.Trainer]:
    """The data and the Trainer of `run`.

    Raises:
        ValueError, MisconfigurationException: what this machine can't do, or the core refuses.
    """
    accelerator, local, nodes = devices.resolve(run.trainer)
    options = run.trainer
    data = SharedImages(*digits(), batch_size=run.data.batch_size, ranks=local * nodes, seed=run.seed)
    trainer = L.Trainer(
        strategy=strategy(run),
        accelerator=accelerator,
        devices=local,
        num_nodes=nodes,
        max_epochs=options.max_epochs,
        precision=options.precision,  # pyrefly: ignore[bad-argument-type] - checked in config.py
        accumulate_grad_batches=options.accumulate_grad_batches,
        deterministic=options.deterministic,
        limit_train_batches=options.limit_train_batches,
        limit_val_batches=options.limit_val_batches,
        log_every_n_steps=options.log_every_n_steps,
        enable_progress_bar=options.enable_progress_bar,
        callbacks=[monitor, *checkpoints(folder / "checkpoints")],
        logger=logger(run.logger.name, folder),
        use_distributed_sampler=False,  # SharedImages does it
        num_sanity_val_steps=0,
        enable_model_summary=False,  # the strategy's own line says what is compressed
        default_root_dir=folder,
    )
    return data, trainer


def strategy(run: Run) -> CompressedDDPStrategy | DelayedStrategy:
    """The strategy of `run`."""
    if isinstance(rounds := run.strategy, DGA):
        return DelayedStrategy(run.compressor, rounds.period, rounds.delay, rounds.outer(), rounds.stale_only)
    return CompressedDDPStrategy(run.compressor, run.topology, run.inside, run.residual_device)


def checkpoints(folder: Path) -> list[ModelCheckpoint]:
    """best.ckpt to use the model, last.ckpt to go on from: it also holds the optimizer and what was not sent yet."""
    best = ModelCheckpoint(
        folder, "best", monitor="val_acc", mode="max", save_weights_only=True, enable_version_counter=False
    )
    # Saved at the end too. With what is remembered on all ranks it is some times the model's size.
    return [best, ModelCheckpoint(folder, "last", every_n_epochs=5, enable_version_counter=False)]


def logger(name: str, folder: Path) -> Logger | bool:
    """The logger that writes into the run's folder; False for none."""
    if name == "none":
        return False
    return (CSVLogger if name == "csv" else TensorBoardLogger)(folder, name="", version="")


if __name__ == "__main__":
    main()
