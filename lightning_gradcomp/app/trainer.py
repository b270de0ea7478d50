"""Lightning's Trainer, with its strategy, callbacks and loggers, from a run's options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_gradcomp.app.callbacks import ProgressBar, SaveOnSigterm, SeedEachStep
from lightning_gradcomp.app.config import DDP, DGA, HSDP, DistAsync, Run, WholeModels
from lightning_gradcomp.app.options.logger import Logger, MLflow, TensorBoard, WandB
from lightning_gradcomp.app.processes import shared_gpus
from lightning_gradcomp.compressors import Lossy
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.plugin import CommunicationMonitor, SparsityWarmup
from lightning_gradcomp.plugin.async_strategy import AsyncStrategy
from lightning_gradcomp.plugin.delayed import DelayedStrategy
from lightning_gradcomp.plugin.hsdp import CompressedHSDPStrategy
from lightning_gradcomp.plugin.strategy import CompressedDDPStrategy

LAST = Path("checkpoints") / "last.ckpt"
PROFILERS: dict[str, Any] = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}


def build_trainer(run: Run, folder: Path, monitor: CommunicationMonitor, placed: tuple[str, int, int]) -> L.Trainer:
    """The Trainer of `run`. `placed`: accelerator, ranks a node, nodes.

    Raises:
        ValueError, MisconfigurationException: an option that Lightning or the strategy refuses on this machine.
    """
    accelerator, per_node, nodes = placed
    shared = shared_gpus(accelerator, per_node)
    gpus = len(set(shared))
    if shared:
        text = f"{per_node} ranks share {gpus} GPU{'s' * (gpus > 1)}"
        rank_zero_info(f"{text} and exchange over gloo: NCCL allows one rank a GPU.")
    options = run.trainer
    epochs, batches, val_batches = options.max_epochs, options.limit_train_batches, options.limit_val_batches
    if run.dry_run:
        epochs, batches, val_batches = 2, 2, 1
        if isinstance(run.compressor, Lossy) and run.compressor.dense_steps:  # or none of four steps were compressed
            run = replace(run, compressor=replace(run.compressor, warmup_steps=0))
    return L.Trainer(
        strategy=strategy(run, shared),
        accelerator=accelerator,
        devices=gpus or per_node,  # Lightning takes no more than there are GPUs; the strategy has the ranks
        num_nodes=nodes,
        max_epochs=epochs,
        precision=options.precision,  # pyrefly: ignore[bad-argument-type] - checked among the options
        accumulate_grad_batches=1 if run.dry_run else options.accumulate_grad_batches,
        gradient_clip_val=options.gradient_clip_val,
        deterministic=options.deterministic,
        profiler=profiler(options.profiler, folder),
        limit_train_batches=batches,
        limit_val_batches=val_batches,
        log_every_n_steps=options.log_every_n_steps,
        enable_progress_bar=options.enable_progress_bar,
        callbacks=callbacks(run, folder, monitor),
        enable_checkpointing=keeps(run),
        logger=loggers(run.logger, folder) if keeps(run) else False,
        use_distributed_sampler=False,  # SharedImages does it
        num_sanity_val_steps=0,
        enable_model_summary=False,  # the strategy prints what is compressed
        default_root_dir=folder,
    )


def keeps(run: Run) -> bool:
    """Whether the run writes metrics and checkpoints, besides its result."""
    return not (run.dry_run or run.evaluate)


def strategy(
    run: Run, shared: Sequence[torch.device] = ()
) -> CompressedDDPStrategy | CompressedHSDPStrategy | DelayedStrategy | AsyncStrategy:
    """The strategy of `run`. `shared`: the GPU of each rank of a node, if ranks share GPUs."""
    timeout = timedelta(seconds=run.strategy.timeout)
    if isinstance(sharded := run.strategy, HSDP):
        names = ("replicate", "shard", "save_distributed_checkpoint", "verify_replicas_every_n_steps")
        options = {name: getattr(sharded, name) for name in names}
        return CompressedHSDPStrategy(run.compressor, residual_device=run.residual_device, timeout=timeout, **options)
    assert isinstance(run.strategy, WholeModels)
    common: dict[str, Any] = {"checkpoint_state": run.strategy.checkpoint_state, "timeout": timeout}
    if shared:
        common |= {"parallel_devices": [*shared], "process_group_backend": "gloo"}
    if isinstance(rounds := run.strategy, DGA):
        names = ("period", "delay", "stale_only", "pending_share", "participation", "error_decay")
        options = {name: getattr(rounds, name) for name in names}
        return DelayedStrategy(run.compressor, outer=rounds.outer(), **options, **common)
    if isinstance(servers := run.strategy, DistAsync):
        options = {name: getattr(servers, name) for name in ("max_staleness", "rate_by_staleness")}
        return AsyncStrategy(run.compressor, servers.bound, pull=servers.pulls, **options, **common)
    gradients = run.strategy
    assert isinstance(gradients, DDP)
    every = {"verify_replicas_every_n_steps": gradients.verify_replicas_every_n_steps}
    return CompressedDDPStrategy(run.compressor, run.topology, run.inside, run.residual_device, **common, **every)


def callbacks(run: Run, folder: Path, monitor: CommunicationMonitor) -> list[Callback]:
    """The progress bar, the monitor, and those that write checkpoints: best.ckpt with the weights, and last.ckpt to
    resume from, which also holds the optimizer and the residuals of all ranks."""
    found: list[Callback] = [ProgressBar()] if run.trainer.enable_progress_bar else []
    if not run.evaluate:
        found += [SeedEachStep(run.seed), monitor]
        if run.trainer.ema_decay is not None:
            found.append(moving_average(run.trainer.ema_decay, run.trainer.ema_every_n_steps))
    if keeps(run):
        place = folder / LAST.parent
        best = {"monitor": "val_acc", "mode": "max", "save_weights_only": True}
        # With the residuals of all ranks, last.ckpt is some times the model's size.
        found += [
            ModelCheckpoint(place, "best", enable_version_counter=False, **best),
            ModelCheckpoint(
                place,
                LAST.stem,
                every_n_epochs=run.trainer.checkpoint_every_n_epochs,
                every_n_train_steps=run.trainer.checkpoint_every_n_steps,
                enable_version_counter=False,
            ),
            SaveOnSigterm(folder / LAST),
        ]
    if run.sparsity_warmup.schedule is not None and not run.evaluate:
        found.append(SparsityWarmup(**asdict(run.sparsity_warmup)))
    if run.trainer.patience and keeps(run):
        found.append(EarlyStopping("val_acc", mode="max", patience=run.trainer.patience, verbose=True))
    return found


def moving_average(decay: float, every_n_steps: int) -> Callback:
    """The exponential moving average of the weights.

    Raises:
        ValueError: Lightning has none before 2.6.
    """
    if not hasattr(lightning_callbacks, "EMAWeightAveraging"):
        raise refusal("trainer.ema_decay", decay, f"null with lightning {L.__version__}; others with 2.6 and later")
    return lightning_callbacks.EMAWeightAveraging(decay=decay, update_every_n_steps=every_n_steps)


def profiler(name: str | None, folder: Path) -> Profiler | None:
    """Lightning's profiler `name`, which writes profile-*.txt into the run's folder."""
    return PROFILERS[name](dirpath=folder, filename="profile") if name else None


def loggers(options: Logger, folder: Path) -> list[Any]:
    """metrics.csv, and the logger that `options` name; none for "none"."""
    if type(options) is Logger:
        return []
    found: list[Any] = [CSVLogger(folder, name="", version="")]
    if isinstance(options, TensorBoard):
        found.append(TensorBoardLogger(folder, name="", version=""))
    if isinstance(options, WandB):
        offline = options.mode == "offline"
        found.append(WandbLogger(name=folder.name, save_dir=folder, project=options.project, offline=offline))
    if isinstance(options, MLflow):
        found.append(
            MLFlowLogger(experiment_name=options.experiment, run_name=folder.name, tracking_uri=options.tracking_uri)
        )
    return found
