"""Comparison of tensors across ranks by digests, and copies of rank 0's tensors to all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_gradcomp.averaging.ranks import Ranks, gather
from lightning_gradcomp.errors import help_at

CHUNK = 1 << 22
"""Bytes hashed at a time. They are copied, because `Tensor.numpy` makes a tensor's storage non-resizable for good."""
WEIGHTS = torch.arange(1, 62) * 0x9E3779B9 | 1
"""Of elements at successive places, in turn. Odd, and as many as a prime number: rows have different weights."""
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def identical(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> bool:
    """True if all ranks hold tensors with the same shapes, dtypes and bits. Sends 32 bytes to every rank. Collective.

    Compares SHA-256 digests, which take 0.8 s per gigabyte on a CPU with SHA instructions (AMD EPYC).
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype} ".encode())
        for chunk in tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).split(CHUNK):
            digest.update(chunk.clone().numpy().data)
    own = torch.tensor(list(digest.digest()), dtype=torch.uint8, device=tensors[0].device)
    return bool((gather(group or dist.group.WORLD, own) == own).all())


@torch.no_grad()
def broadcast(tensors: list[torch.Tensor], ranks: Ranks) -> None:
    """Copy rank 0's `tensors` to all ranks, in place, in one message. Collective."""
    if tensors:
        message = torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors])
        dist.broadcast(message, group=ranks.group, group_src=0)
        for tensor, part in zip(tensors, message.split([tensor.nbytes for tensor in tensors]), strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def broadcast_unless_identical(tensors: list[torch.Tensor], ranks: Ranks) -> None:
    """Copy rank 0's `tensors` to all ranks, in place, unless they are bit-identical. Collective."""
    if tensors and not identical(tensors, ranks.group):
        broadcast(tensors, ranks)


def share_buffers(models: Iterable[nn.Module], ranks: Ranks) -> None:
    """Copy rank 0's buffers to all ranks, except those that the models tell DDP to ignore. Collective."""
    broadcast([buffer for model in models for buffer in replicated_buffers(model).values()], ranks)


class ReplicasDiffer(RuntimeError):
    """The ranks no longer hold the same parameters."""


def ignored_by_ddp(model: nn.Module) -> set[str]:
    """Names of the parameters and buffers that the model tells DDP to ignore."""
    names: Any = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    return set(names)


def replicated(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that must be the same on all ranks: all but those that the model tells DDP to ignore.

    Buffers are left out: forward passes change them by each rank's data, as those of batch norms and of quantisation's
    observers, or by its local weights, as those of spectral norm.
    """
    ignored = ignored_by_ddp(model)
    return [(name, parameter) for name, parameter in model.named_parameters() if name not in ignored]


def replicated_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers, by name, that DDP copies from rank 0: all but those that the model tells it to ignore."""
    ignored = ignored_by_ddp(model)
    return {name: buffer for name, buffer in model.named_buffers() if name not in ignored}


def initial_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers that are rank 0's on all ranks when training starts."""
    return [*(parameter for _, parameter in replicated(model)), *replicated_buffers(model).values()]


def checksum(parameter: torch.Tensor) -> torch.Tensor:
    """A weighted sum of a tensor's elements read as integers: 0-d int64, independent of the memory layout."""
    bits, columns = parameter.detach().contiguous().view(-1).view(BITS[parameter.itemsize]), len(WEIGHTS)
    padded = nn.functional.pad(bits, (0, columns - len(bits) % columns)).view(-1, columns)
    return (padded.sum(0, dtype=torch.int64) * WEIGHTS.to(bits.device)).sum()


def unlike_rank_zero(own: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """True where a rank's checksum, int64 [n], is not rank 0's: bool [ranks, n]. Collective."""
    everyone = gather(group or dist.group.WORLD, own)
    return everyone != everyone[0]


def first_difference(differs: torch.Tensor) -> tuple[int, str]:
    """The first tensor that differs, and on which ranks, of `unlike_rank_zero`: (index, "1, 3")."""
    first = int(differs.any(0).int().argmax())
    return first, ", ".join(map(str, differs[:, first].nonzero().flatten().tolist()))


def compare_replicas(
    named: Iterable[tuple[str, torch.Tensor]], step: int, group: dist.ProcessGroup | None = None
) -> None:
    """Raises ReplicasDiffer on every rank if parameters differ from rank 0's. Sends 8 bytes for each. Collective."""
    names, sums = zip(*((name, checksum(parameter)) for name, parameter in named), strict=True)
    differs = unlike_rank_zero(torch.stack(sums), group)
    if differs.any():
        first, which = first_difference(differs)
        raise ReplicasDiffer(
            f"step {step}: parameter {names[first]!r} on rank {which} is not rank 0's "
            f"({int(differs.any(0).sum())} of {len(names)} parameters differ) {help_at('ranks-differ')}"
        )
