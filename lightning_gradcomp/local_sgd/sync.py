"""Synchronisation of buffers, optimizer state and copies of the weights in a drain.

Between drains each rank's batch norm statistics and optimizer moments follow its own data. A drain averages them,
weighted by samples. Buffers that can't be averaged (counters, masks with infinities) are copied from rank 0.
Each rank also has copies of its weights, such as moving averages, which become the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from lightning_gradcomp.averaging.ranks import Ranks, add
from lightning_gradcomp.averaging.replicas import broadcast, checksum, replicated, replicated_buffers, unlike_rank_zero
from lightning_gradcomp.local_sgd.optimizer_state import average_numbers, moments_of, unify


def sample_weight(own: int, counts: Sequence[int]) -> float:
    """The factor for this rank's tensor that turns a mean over ranks into a mean over their samples."""
    return own * len(counts) / max(sum(counts), 1)


def weighted_means(ranks: Ranks, parts: list[tuple[torch.Tensor, int]]) -> tuple[list[torch.Tensor | None], int]:
    """Average flat tensors over the samples of all ranks, with a single sum. Collective.

    Each of `parts` is (fp32 [n], samples of this rank). A non-finite tensor has weight 0. Returns the means, each None
    if no rank has samples for it, and the bytes that this rank sent.
    """
    counts = [n if bool(flat.isfinite().all()) else 0 for flat, n in parts]
    own = torch.tensor(counts, device=parts[0][0].device)
    table = ranks.gather(own)
    all_counts = table.T.tolist()
    weights = [sample_weight(n, all_n) / ranks.world for n, all_n in zip(counts, all_counts, strict=True)]
    pairs = zip(parts, weights, strict=True)
    message = torch.cat([flat * weight if weight else torch.zeros_like(flat) for (flat, _), weight in pairs])
    add(ranks.group, message)
    found = zip(message.split([len(flat) for flat, _ in parts]), all_counts, strict=True)
    sent = ranks.gather_traffic(own.nbytes) + ranks.add_traffic(message.nbytes, message.device)
    return [mean if any(all_n) else None for mean, all_n in found], sent


class Buffers:
    """The model's buffers that are in its `state_dict`. All ranks must hold the same ones at construction.

    For finite floating-point buffers, the change since the last drain is averaged, so an unchanged buffer keeps its
    bits. Other buffers are copied from rank 0, and so are those that were resized.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        averaged = {n: b for n, b in self._current().items() if b.is_floating_point() and bool(b.isfinite().all())}
        self._start = {name: buffer.clone() for name, buffer in averaged.items()}

    def _current(self) -> dict[str, torch.Tensor]:
        saved = self.model.state_dict(keep_vars=True)
        return {name: buffer for name, buffer in replicated_buffers(self.model).items() if name in saved}

    def _averaged(self) -> dict[str, torch.Tensor]:
        start = self._start
        return {n: b for n, b in self._current().items() if n in start and b.shape == start[n].shape}

    def current(self) -> list[torch.Tensor]:
        """All of these buffers."""
        return list(self._current().values())

    def not_averaged(self) -> list[torch.Tensor]:
        """The buffers that are copied from rank 0."""
        averaged = self._averaged()
        return [buffer for name, buffer in self._current().items() if name not in averaged]

    def changes(self) -> torch.Tensor:
        """The changes of the averaged buffers since the last drain: fp32 [n]."""
        changes = [buffer.float() - self._start[name].float() for name, buffer in self._averaged().items()]
        return _flatten(changes, self.model)

    def set_changes(self, changes: torch.Tensor) -> None:
        """Set the averaged buffers to their values after the last drain plus `changes`, fp32 [n]."""
        averaged = self._averaged()
        parts = changes.split([buffer.numel() for buffer in averaged.values()])
        for (name, buffer), change in zip(averaged.items(), parts, strict=True):
            buffer.copy_(self._start[name] + change.view(buffer.shape))
            self._start[name] = buffer.clone()


def _flatten(tensors: list[torch.Tensor], model: nn.Module) -> torch.Tensor:
    """The concatenated elements of fp32 `tensors`; a tensor of length 0 if there are none."""
    empty = torch.zeros(0, dtype=torch.float32, device=next(model.parameters()).device)
    return torch.cat([empty, *(tensor.reshape(-1) for tensor in tensors)])


@torch.no_grad()
def sync_buffers_and_moments(
    ranks: Ranks, buffers: Buffers, optimizers: Sequence[torch.optim.Optimizer], samples: int, *, moments_valid: bool
) -> int:
    """Make the model's buffers and the state of `optimizers` the same on all ranks. Collective.

    See `optimizer_state` for what is averaged and what is copied. Each rank keeps the state of other optimizers.
    `samples` are this rank's since the last drain; with `moments_valid`, its optimizer state counts in the average.
    Returns the bytes that this rank sent, not counting the buffers that rank 0 broadcasts.
    """
    device = next(buffers.model.parameters()).device
    matches, sent = unify(ranks, optimizers, device)
    counted = samples if moments_valid and matches else 0
    moments = moments_of(optimizers)
    flat = _flatten([moment.float() for moment in moments], buffers.model)
    (mean_changes, mean_moments), sent_in_sum = weighted_means(ranks, [(buffers.changes(), samples), (flat, counted)])
    if mean_changes is not None:
        buffers.set_changes(mean_changes)
    if mean_moments is None:
        broadcast(moments, ranks)
    else:
        for moment, part in zip(moments, mean_moments.split([moment.numel() for moment in moments]), strict=True):
            moment.copy_(part.view(moment.shape))
    if optimizers:
        sent += average_numbers(ranks, optimizers, counted, device)
    broadcast(buffers.not_averaged(), ranks)
    return sent + sent_in_sum


def untrained(model: nn.Module, trained: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The model's parameters that are not in `trained`, such as a teacher's, and that DDP is not told to ignore."""
    ids = {id(parameter) for parameter in trained}
    return [p for _, p in replicated(model) if id(p) not in ids]


def tensors_of(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """The parameters and buffers of `modules`."""
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


@torch.no_grad()
def sync_copies(ranks: Ranks, tensors: Sequence[torch.Tensor], device: torch.device) -> int:
    """Make the copies the same on all ranks. Returns the bytes sent, except what rank 0 broadcasts. Collective.

    Averages the floating-point tensors that differ: the mean of the ranks' moving averages is the moving average of
    their mean weights. Copies others from rank 0. A tensor that is the same on all ranks keeps its bits.
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
