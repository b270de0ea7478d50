"""Batch norm's buffers, which DDP sends to all before every forward pass: as many round trips as a compressed step has.

Batch norm doesn't look at them while it trains, so they are sent before validation, test and prediction, and at the end
of training, instead. Where other modules have buffers, DDP goes on as it does.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.replicas import broadcast, ignored_by_ddp
from lightning_gradcomp.compressors import Compressor, LossyCompressor


def only_batch_norm_has_buffers(model: nn.Module) -> bool:
    """Whether every buffer belongs to a batch norm layer; SyncBatchNorm, which has exchanges of its own, counts."""
    owners = [module for module in model.modules() if next(module.buffers(recurse=False), None) is not None]
    return all(isinstance(module, _BatchNorm) for module in owners)


def spare_buffers(ddp: DistributedDataParallel, compressor: Compressor) -> bool:
    """Keep DDP from sending buffers before every forward pass, where nobody would look at them.

    Returns:
        Whether `share_buffers` has to make up for it.
    """
    spared = isinstance(compressor, LossyCompressor) and only_batch_norm_has_buffers(ddp.module)
    if spared:
        ddp.broadcast_buffers = False
    return spared


def share_buffers(model: nn.Module, ranks: Ranks) -> None:
    """Before they are looked at: rank 0's buffers for all, but those that DDP is told to ignore."""
    ignored = ignored_by_ddp(model)
    broadcast([buffer for name, buffer in model.named_buffers() if name not in ignored], ranks)
