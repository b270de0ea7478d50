"""What CompressedDDPStrategy can't honour, found before other processes are started."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_gradcomp.averaging.takeover import check_optimizer
from lightning_gradcomp.compressors import Compressor, Lossy
from lightning_gradcomp.errors import refusal


def check_clipping(compressor: Compressor, trainer: Trainer, module: LightningModule) -> None:
    """Refuse clipping that a compressor which owns the momentum can't do locally, before the accumulation.

    Raises:
        ValueError: clipping by value, in a hook of the user's, or with a second threshold.
    """
    if not compressor.owns_momentum:
        return
    name = type(compressor).__name__
    if is_overridden("configure_gradient_clipping", module):
        allowed = f"{name}(clip_norm=...): the hook would clip what is sent, which has left the memory already"
        raise refusal(f"configure_gradient_clipping with {name}", "a hook of the module", allowed)
    if trainer.gradient_clip_val is None:
        return
    if trainer.gradient_clip_algorithm == "value":
        raise refusal(f"Trainer(gradient_clip_algorithm) with {name}", "value", "norm, which is applied locally")
    if getattr(compressor, "clip_norm", None) is not None:
        allowed = f"one of {name}(clip_norm=...) and Trainer(gradient_clip_val=...), which mean the same here"
        raise refusal(f"{name}.clip_norm and Trainer(gradient_clip_val)", "both", allowed)


def check_optimizers(compressor: Compressor, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that the compressor doesn't fit.

    Raises:
        ValueError: momentum that the compressor would have to own and can't, or several steps from one average.
    """
    if compressor.owns_momentum and len(optimizers) > 1:
        raise refusal(f"optimizers with {type(compressor).__name__}", len(optimizers), "1, a torch.optim.SGD")
    for optimizer in optimizers:
        check_optimizer(compressor, optimizer)
        if isinstance(compressor, Lossy) and isinstance(optimizer, torch.optim.LBFGS):
            allowed = "an optimizer that computes one gradient a step, or strategy='ddp_dense'"
            raise refusal(f"the optimizer with {type(compressor).__name__}", "LBFGS", allowed)


def check_batches(counts: Sequence[float]) -> None:
    """Refuse ranks with different numbers of batches: the longer ones would wait for the others for ever.

    Args:
        counts: batches an epoch of every rank; infinite where it is not known.

    Raises:
        ValueError: they differ.
    """
    if len(set(counts)) > 1:
        got = ", ".join(f"rank {rank}: {count:g}" for rank, count in enumerate(counts))
        raise refusal("training batches an epoch", got, "as many on every rank (DistributedSampler, or drop_last=True)")
