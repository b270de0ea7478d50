"""Checks of options, optimizers and Trainer features. Errors name the option, its value and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm

from lightning_gradcomp.averaging.checkpoint_state import CHECKPOINT_STATES
from lightning_gradcomp.averaging.ranks import gather
from lightning_gradcomp.averaging.trainable import check_trainable
from lightning_gradcomp.compressors import Compressor, LossyCompressor
from lightning_gradcomp.compressors.layout import plain_name
from lightning_gradcomp.errors import is_whole, refusal

AVERAGING_OPTIONS = (
    "ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period", "mixed_precision",
)  # fmt: skip
"""Options of DDPStrategy that change how gradients are averaged, or need DDP's one hook."""


def check_ddp_options(strategy: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError if one of DDP's options is one of `AVERAGING_OPTIONS`."""
    for option in AVERAGING_OPTIONS:
        if options.get(option) is not None:
            raise refusal(f"{strategy}.{option}", options[option], "None: the compressor averages")


def check_verification(every_n_steps: int | None) -> None:
    """Raise ValueError unless the interval of replica comparisons is None or at least 1 step."""
    if every_n_steps is not None and (not is_whole(every_n_steps) or every_n_steps < 1):
        raise refusal("verify_replicas_every_n_steps", every_n_steps, "None (never), or a whole number from 1")


def check_checkpoint_state(checkpoint_state: str) -> None:
    """Raise ValueError unless `checkpoint_state` is one of `CHECKPOINT_STATES`."""
    if checkpoint_state not in CHECKPOINT_STATES:
        raise refusal("checkpoint_state", checkpoint_state, ", ".join(repr(mode) for mode in CHECKPOINT_STATES))


def corrected_optimizer(
    compressor: Compressor, optimizers: Sequence[torch.optim.Optimizer], automatic: bool
) -> torch.optim.Optimizer | None:
    """The optimizer whose momentum the averager may correct; None if there are several or none is known yet.

    In manual optimization (not `automatic`), where users clip averages, only compressors that need an optimizer get
    one. The error feedback of others stays on gradients.
    """
    known = len(optimizers) == 1 and (automatic or compressor.needs_optimizer)
    return optimizers[0] if known else None


def clips(trainer: Trainer) -> bool:
    """True if the Trainer clips gradients."""
    return trainer.gradient_clip_val is not None and trainer.gradient_clip_val > 0  # Lightning's own condition


def check_clipping(
    compressor: Compressor, optimizer: torch.optim.Optimizer | None, trainer: Trainer, module: LightningModule
) -> None:
    """Raise ValueError if the compressor owns the momentum but can't do the Trainer's clipping before accumulation.

    It can't clip by value, in a user's hook, or with two thresholds.
    """
    if not isinstance(compressor, LossyCompressor) or not compressor.state_for(optimizer).owns_momentum:
        return
    name = type(compressor).__name__
    if is_overridden("configure_gradient_clipping", module):
        allowed = f"{name}(clip_norm=...): the hook would clip averages, which have already left the residual"
        raise refusal(f"configure_gradient_clipping with {name}", "a hook of the module", allowed)
    if not clips(trainer):
        return
    if trainer.gradient_clip_algorithm == "value":
        raise refusal(f"Trainer(gradient_clip_algorithm) with {name}", "value", "norm, which is applied locally")
    if compressor.clip_norm is not None:
        allowed = f"one of {name}(clip_norm=...) and Trainer(gradient_clip_val=...), which mean the same here"
        raise refusal(f"{name}.clip_norm and Trainer(gradient_clip_val)", "both", allowed)


def check_clipping_averages(
    compressor: Compressor, optimizer: torch.optim.Optimizer | None, where: str, got: str
) -> None:
    """Raise ValueError if the compressor owns the momentum: what clipping cuts off has already left the residual."""
    name = type(compressor).__name__
    if compressor.state_for(optimizer).owns_momentum:
        allowed = f"{name}(clip_norm=...), which clips each rank's gradient before it is accumulated"
        raise refusal(f"clipping with {name} {where}", got, allowed)


def check_local_weights(trainer: Trainer, module: LightningModule) -> None:
    """Raise ValueError for features that keep tensors computed from a forward pass's weights, which differ by rank.

    Pruning computes masks from the latest forward pass's weights; torch.nn.utils.weight_norm stores the weight that it
    computes before each pass.
    """
    allowed = "local_weights=False for the strategy"
    pruning = [c for c in trainer.callbacks if isinstance(c, ModelPruning)]  # type: ignore[attr-defined]
    if pruning:
        raise refusal("a callback with local weights", type(pruning[0]).__name__, allowed)
    for name, part in module.named_modules():
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, BasePruningMethod | WeightNorm):
                what = f"a hook that computes a weight of {name!r} before each forward pass, with local weights"
                raise refusal(what, type(hook).__name__, f"{allowed}, or torch.nn.utils.parametrizations")


def check_model(compressor: Compressor, module: LightningModule) -> None:
    """Raise ValueError if a parameter can't be trained, or a pattern of the compressor matches no parameter.

    If `module` makes or freezes layers after the launch, they are checked then instead.
    """
    if not is_overridden("configure_model", module) and not is_overridden("setup", module):
        check_trainable(module)
        compressor.check_names(plain_name(name) for name, _ in module.named_parameters())


def check_callbacks(strategy: Strategy, trainer: Trainer) -> None:
    """Raise ValueError if a callback of this package does not work with `strategy`."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if hasattr(callback, "check_strategy"):
            callback.check_strategy(strategy)


def check_optimizers(compressor: Compressor, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ValueError if the compressor can't own an optimizer's momentum, or one uses several gradients per step."""
    if compressor.needs_optimizer and len(optimizers) > 1:
        allowed = "1, a torch.optim.SGD, Adam or AdamW"
        raise refusal(f"optimizers with {type(compressor).__name__}", len(optimizers), allowed)
    for optimizer in optimizers:
        compressor.check_optimizer(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS):
            check_gradients(compressor, optimizer, optimizer.param_groups[0]["max_eval"])


def check_gradients(compressor: Compressor, optimizer: torch.optim.Optimizer, gradients: int) -> None:
    """Raise ValueError if an optimizer uses several gradients per step: each would be accumulated as a step."""
    if gradients > 1 and isinstance(compressor, LossyCompressor):
        what = f"gradients in one step of {type(optimizer).__name__} with {type(compressor).__name__}"
        raise refusal(what, gradients, "1; strategy='ddp_dense' for optimizers that need more")


def check_batches(trainer: Trainer, device: torch.device) -> None:
    """Raise ValueError if ranks have different numbers of batches per epoch (infinite if unknown). Collective.

    Ranks with more batches would wait for the others.
    """
    own = torch.tensor([float(trainer.num_training_batches)], dtype=torch.float32, device=device)
    counts = gather(dist.group.WORLD, own).flatten().tolist()
    if len(set(counts)) > 1:
        got = ", ".join(f"rank {rank}: {count:g}" for rank, count in enumerate(counts))
        raise refusal("training batches an epoch", got, "equal on every rank (DistributedSampler, or drop_last=True)")
