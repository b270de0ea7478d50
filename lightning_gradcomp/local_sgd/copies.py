"""Copies of each rank's weights, such as moving averages, which a drain makes the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.replicas import broadcast, checksum, ignored_by_ddp, unlike_rank_zero
from lightning_gradcomp.local_sgd.sync import weighted_means


def untrained(model: nn.Module, trained: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The model's parameters that are not in `trained`, such as a teacher's, and that DDP is not told to ignore."""
    ids, ignored = {id(parameter) for parameter in trained}, ignored_by_ddp(model)
    return [p for name, p in model.named_parameters() if id(p) not in ids and name not in ignored]


def tensors_of(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """The parameters and buffers of `modules`."""
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


@torch.no_grad()
def sync_copies(ranks: Ranks, tensors: Sequence[torch.Tensor], device: torch.device) -> int:
    """Make the copies the same on all ranks. Collective.

    Averages the floating-point tensors that differ: the mean of the ranks' moving averages is the moving average of
    their mean weights. Copies others from rank 0. A tensor that is the same on all ranks keeps its bits.

    Returns:
        Bytes that this rank sent, not counting what rank 0 broadcasts.
    """
    if not tensors or ranks.world == 1:
        return 0
    sums = torch.stack([checksum(tensor).to(device) for tensor in tensors])
    differs = unlike_rank_zero(sums, ranks.group).any(0).tolist()
    differing = [tensor for tensor, does in zip(tensors, differs, strict=True) if does]
    averaged = [tensor for tensor in differing if tensor.is_floating_point()]
    copied, sent = [tensor for tensor in differing if not tensor.is_floating_point()], 0
    if averaged:
        flat = torch.cat([tensor.to(device, torch.float32).reshape(-1) for tensor in averaged])
        [mean], sent = weighted_means(ranks, [(flat, 1)])
        if mean is None:
            copied += averaged
        else:
            for tensor, part in zip(averaged, mean.split([tensor.numel() for tensor in averaged]), strict=True):
                tensor.copy_(part.view(tensor.shape))
    moved = [tensor.to(device) for tensor in copied]
    broadcast(moved, ranks)
    for tensor, of_rank_zero in zip(copied, moved, strict=True):
        tensor.copy_(of_rank_zero)
    return ranks.gather_traffic(sums.nbytes) + sent
