"""Checks that parameters are trainable, and that all ranks train the same ones at the same step.

A trainable parameter must be real and have dense gradients; a frozen one may be of any kind. The trainable parameters
determine the lengths of messages, so they must be the same on all ranks. The ranks must also be at the same step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from zlib import crc32

import torch
from torch import nn

from lightning_gradcomp.averaging.ranks import Ranks, gather
from lightning_gradcomp.averaging.replicas import ignored_by_ddp
from lightning_gradcomp.compressors.layout import plain_name
from lightning_gradcomp.errors import refusal


def parameters_of(*optimizers: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The optimizers' parameters, in the order of their `state_dict`."""
    return [parameter for each in optimizers for group in each.param_groups for parameter in group["params"]]


def has_stepped(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    stepped = {id(p) for p in parameters_of(*optimizers)}
    return any(id(p) in stepped for p in model.parameters())


def check_none_ignored(model: nn.Module, what: str) -> None:
    """Raises ValueError if DDP is told to ignore a trainable parameter, which `what` can't leave to each rank."""
    ignored = ignored_by_ddp(model)
    for name, parameter in model.named_parameters():
        if name in ignored and parameter.requires_grad:
            got = "a trainable parameter in _ddp_params_and_buffers_to_ignore"
            raise refusal(f"parameter {plain_name(name)!r} with {what}", got, "requires_grad=False, or not ignored")


def check_trainable(model: nn.Module) -> None:
    """Raises ValueError if gradients can't be laid out flat in fp32.

    They can't for complex parameters and embeddings with sparse=True that require gradients. DDP may ignore any kind.
    """
    ignored = ignored_by_ddp(model)
    for name, parameter in model.named_parameters():
        if name not in ignored and parameter.requires_grad and parameter.is_complex():
            allowed = "a real floating-point type, or requires_grad=False"
            raise refusal(f"parameter {plain_name(name)!r}", parameter.dtype, allowed)
    for name, module in model.named_modules():
        weight = f"{name}.weight" if name else "weight"
        is_sparse = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        if is_sparse and module.weight.requires_grad and weight not in ignored:
            allowed = "sparse=False, or a weight with requires_grad=False"
            raise refusal(f"gradients of {plain_name(name)!r}", f"{type(module).__name__}(sparse=True)", allowed)


def check_same_parameters(
    named: Sequence[tuple[str, torch.Tensor]], trains: Sequence[bool], ranks: Ranks, device: torch.device
) -> None:
    """Raises ValueError on every rank if ranks train different parameters. Collective.

    `named` has all parameters that may train, and `trains` is True for those that train now.
    """
    if ranks.world == 1:
        return
    fingerprint = crc32(repr([(name, tuple(parameter.shape)) for name, parameter in named]).encode())
    models = _everyones([len(named), fingerprint], ranks, device)
    if (models != models[0]).any():
        got = ", ".join(f"rank {rank}: {int(count)}" for rank, count in enumerate(models[:, 0].tolist()))
        if (models[:, 0] == models[0, 0]).all():
            got += ", with different names, shapes or order"
        raise refusal("parameters of the model that an optimizer has", got, "the same on every rank")
    masks = _everyones(list(trains), ranks, device)
    differs = (masks != masks[0]).any(0)
    if differs.any():
        first = int(differs.int().argmax())
        doing = ["is frozen", "trains"]
        got = ", ".join(f"{doing[int(does)]} on rank {rank}" for rank, does in enumerate(masks[:, first].tolist()))
        raise refusal(f"parameter {named[first][0]!r}", got, "the same on every rank")


def check_same_step(
    ranks: Ranks, device: torch.device, step: int, optimizer: int = 0, backwards: int = 0, *, differ: bool = False
) -> None:
    """Raises ValueError on every rank if ranks do not average the same gradients. Collective.

    They may differ by step, by the index of the optimizer, or by the number of backward passes so far. `differ` is True
    if it is known that the steps do.
    """
    everyones = _everyones([step, optimizer, backwards], ranks, device)
    if differ or (everyones != everyones[0]).any():
        names = [f"step {step}, optimizer {index}, backward pass {count}" for step, index, count in everyones.tolist()]
        if (everyones[:, 1:] == 0).all():
            names = [f"step {step}" for step in everyones[:, 0].tolist()]
        got = "; ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
        allowed = "the same on every rank. Some ranks skipped an optimizer step: skip it on all of them"
        raise refusal("steps at which gradients are averaged", got, f"{allowed}, judging by averaged gradients")


def _everyones(own: Sequence[int | bool], ranks: Ranks, device: torch.device) -> torch.Tensor:
    """The numbers of all ranks, int64 [N, m], on the CPU."""
    message = torch.tensor(own, dtype=torch.int64, device=device)
    return gather(ranks.group, message).cpu()
