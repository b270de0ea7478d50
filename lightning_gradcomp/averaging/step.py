"""One average from top to bottom: compensate, encode, exchange, decode and sum, agree, apply. The optimizer commits it.

There are three kinds. `average_dense` sends gradients uncompressed, without error feedback. `average_compressed` keeps
unsent gradient in a residual. `flush`, the first dense average after compressed ones, sends the residuals too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from lightning_gradcomp.averaging.exchange import (
    CALLER_FLAGS,
    Exchange,
    Extras,
    Flags,
    all_reduce_mean,
    read_flags,
    to_flags,
)
from lightning_gradcomp.averaging.few_bits import first_blocks, mean_in_few_bits
from lightning_gradcomp.averaging.fsdp.shards import local
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.memory import Memory
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.stats import Stats
from lightning_gradcomp.averaging.two_phase import TwoPhaseExchange
from lightning_gradcomp.compressors.base import LossyCompressor
from lightning_gradcomp.compressors.blocks import FORMATS, FewBits
from lightning_gradcomp.compressors.decoded import Dense, all_finite
from lightning_gradcomp.errors import refusal


@dataclass(frozen=True)
class Average:
    """The outcome of an average.

    Args:
        flags: flags of all ranks, combined.
        names: parameters whose `p.grad` was written.
        commit: makes the new state current for the parameters that the optimizer stepped. None: the state does not
            change, because the average was dense, a gradient was not finite, or the flags say that no rank applies it.
        values: maps a name to its part of the average; 1-D, some or all elements.
    """

    flags: Flags
    names: frozenset[str] = frozenset()
    commit: Callable[[Set[str]], None] | None = None
    values: Callable[[str], torch.Tensor] = lambda name: torch.empty(0, dtype=torch.float32)


def average_compressed(
    memory: Memory, compressor: LossyCompressor, topology: str, step: int, flags: Flags, stats: Stats
) -> Average:
    """Replace `p.grad` with the average of what the workers send. The rest stays in their residuals.

    If a gradient is not finite on any rank, `p.grad` becomes NaN on all ranks, and all state stays as it was.

    `compressor` is the one at this step's sparsity, and `step` the number of steps so far.
    """
    gradients = memory.gradients
    memory.use_topology(topology)
    bad, present = _compensate(memory, flags, stats)
    _fill_if(bad, gradients.compressed_flat, 0.0)

    extras = Extras(gradients.dense_flat, compressor.dense_values, bad, present)
    how = memory.ranks, step, extras, stats, gradients.mean_buffer
    owned = memory.partition
    exchange = TwoPhaseExchange(owned, topology == "server", *how) if owned else Exchange(*how)
    mean, sent = compressor.average(gradients.compressed_flat, gradients.layout, exchange, memory.compressed)
    exchange.finish()

    stats.now("decompress")
    good, anywhere, flags = _agreed(memory.ranks, *extras.read(mean.finite()), gradients.device)
    if not good or flags.void:
        return _without_effect(gradients, anywhere, flags)
    memory.subtract(sent, extras.sent, extras.mean)
    gradients.assign_updates(mean, extras.mean, anywhere, memory.compressed)
    return Average(flags, gradients.marked(anywhere), memory.commit, partial(gradients.values, mean, extras.mean))


def flush(memory: Memory, flags: Flags, stats: Stats) -> Average:
    """Replace `p.grad` with the dense average of gradients plus residuals, and hand the momentum to the optimizer."""
    gradients, ranks = memory.gradients, memory.ranks
    bad, present = _compensate(memory, flags, stats)
    memory.add_partitions()
    _fill_if(bad, gradients.compressed_flat, torch.nan)
    started = memory.started  # parameters without a gradient send their residuals too
    for number, name in enumerate(gradients.names):
        present[number] |= name in started

    moments = memory.compressed.next_optimizer_state
    flats = [*gradients.flats, *moments.values()]
    stats.now("exchange")
    [mean, dense_mean, *means], found = all_reduce_mean(ranks, flats, present)
    stats.bytes_sent = stats.bytes_received = ranks.dense_traffic(sum(flat.nbytes for flat in flats))

    stats.now("decompress")
    good = bool(all_finite(mean) & all_finite(dense_mean))
    good, anywhere, flags = _agreed(ranks, good, found, gradients.device)
    if not good or flags.void:
        return _without_effect(gradients, anywhere, flags)
    gradients.assign_updates(Dense(mean), dense_mean, anywhere, memory.compressed)
    commit = partial(memory.commit_all_sent, dict(zip(moments, means, strict=True)))
    return Average(flags, gradients.marked(anywhere), commit, partial(gradients.values, Dense(mean), dense_mean))


def average_dense(gradients: Gradients, ranks: Ranks, wire: str, step: int, flags: Flags) -> Average:
    """Replace `p.grad` with its mean over the ranks, sent in the format `wire`."""
    gradients.collect(unscale=False)
    present, saturate = [*gradients.present, *flags], gradients.scale == 1
    if wire in FORMATS:
        mean, dense_mean, found = _mean_in_few_bits(FORMATS[wire], gradients, ranks, present, step)
    else:
        [mean, dense_mean], found = all_reduce_mean(ranks, gradients.flats, present, wire, saturate)
    # Without shards all ranks have the same mean, finite or not, so they need not agree.
    good = not ranks.shards or bool(all_finite(mean) & all_finite(dense_mean))
    good, anywhere, flags = _agreed(ranks, good, found, gradients.device)
    if not good or flags.void:
        return _without_effect(gradients, anywhere, flags)
    gradients.assign(Dense(mean), dense_mean, anywhere, [1.0] * len(gradients.compressed), 1.0)
    return Average(flags)


def _mean_in_few_bits(
    form: FewBits, gradients: Gradients, ranks: Ranks, present: list[bool], step: int
) -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
    """Like `all_reduce_mean` of both buffers."""
    layout, flat, dense = gradients.layout, gradients.compressed_flat, gradients.dense_flat
    first, views = first_blocks(form, gradients.chosen), layout.views(flat)
    large = [(first[name], view) for name, view in zip(layout.names, views, strict=True)]
    shard = ranks.shards.rank() if ranks.shards else 0
    small = [dense, to_flags(present, flat.device, torch.float32)]
    means, small_means = mean_in_few_bits(ranks, form, large, small, step, shard)
    if views:  # else torch._foreach_copy_ raises an error
        torch._foreach_copy_(views, means)
    dense_mean, anywhere = small_means.split([part.numel() for part in small])
    return flat, dense_mean, read_flags(anywhere > 0)


def _compensate(memory: Memory, flags: Flags, stats: Stats) -> tuple[torch.Tensor, list[bool]]:
    """Fill the buffers with this worker's gradients plus residuals.

    Returns True if a gradient is not finite (0-d bool), and `Extras.present`.
    """
    gradients, ranks = memory.gradients, memory.ranks
    present = [*gradients.present, *flags]
    stats.now("compress")
    gradients.collect()
    if ranks.per_worker > 1:
        stats.now("exchange")
        present = ranks.average_inside(gradients.flats, present)
        stats.now("compress")
    memory.share_inside()
    if memory.clip_norm is not None:
        _clip(gradients.flats, memory.clip_norm, ranks)
    return ~memory.compensate(), present


def _clip(flats: list[torch.Tensor], clip_norm: float, ranks: Ranks) -> None:
    """Clip a worker's whole gradient in place at √N · clip_norm, where N is the number of workers.

    The mean of N independent gradients has about 1/√N of the norm of one. Clipping locally at √N · clip_norm thus
    stands in for clipping the average at clip_norm.
    """
    norms = torch.stack([flat.norm() for flat in flats])
    norm = ranks.over_shards(norms.square().sum()).sqrt() if ranks.shards else torch.linalg.vector_norm(norms)
    factor = torch.clamp(ranks.workers**0.5 * clip_norm / (norm + 1e-6), max=1.0)
    for flat in flats:
        flat.mul_(factor)


def _agreed(ranks: Ranks, good: bool, found: list[bool], device: torch.device) -> tuple[bool, list[bool], Flags]:
    """What all ranks agree on after an exchange, in which each shard of a replica has a mean of its own.

    `good` is True if the mean is finite, and `found` is what `_compensate` returns, of all ranks. Returns both, with
    the flags apart.
    """
    bad, *flags = ranks.any_shard([not good, *found[-CALLER_FLAGS:]], device)
    return not bad, found[:-CALLER_FLAGS], Flags(*flags)


def _without_effect(gradients: Gradients, anywhere: list[bool], flags: Flags) -> Average:
    """An average that changes no state. Gradients become NaN, unless the flags say that no rank applies it."""
    if not flags.void:
        gradients.fill(torch.nan, anywhere)
    return Average(flags)


def _fill_if(bad: torch.Tensor, flat: torch.Tensor, value: float) -> None:
    if flat.is_cuda:  # reading `bad` would wait for the GPU
        flat.masked_fill_(bad, value)
    elif bad:
        flat.fill_(value)


class Pending:
    """An average that no optimizer step has used yet.

    Args:
        named: name and parameter of everything that was averaged, as in the model.
        optimizers: the optimizers whose steps use it.
        own: parameters and this rank's gradients before the average, if it may be revoked.
    """

    def __init__(
        self,
        average: Average,
        named: Sequence[tuple[str, nn.Parameter]],
        optimizers: Sequence[torch.optim.Optimizer],
        own: Sequence[tuple[nn.Parameter, torch.Tensor]] | None = None,
    ) -> None:
        self._own = own
        self.average, self._optimizers = average, optimizers
        self._named = [(name, p) for name, p in named if name in average.names and p.grad is not None]
        self._written = {id(p): (p.grad, _versions(p.grad)) for _, p in self._named if p.grad is not None}

    def belongs_to(self, optimizer: torch.optim.Optimizer | None) -> bool:
        return optimizer is None or any(optimizer is each for each in self._optimizers)

    def _is_untouched(self, parameter: nn.Parameter) -> bool:
        grad, versions = self._written[id(parameter)]
        return parameter.grad is grad and _versions(grad) == versions

    def _was_moved(self, parameter: nn.Parameter) -> bool:
        """True if another tensor holds the average, as after DDP rebuilds its buckets in the second forward pass."""
        grad, versions = self._written[id(parameter)]
        if parameter.grad is None or parameter.grad is grad or _versions(grad) != versions:
            return False
        return torch.equal(local(parameter.grad), local(grad))

    @property
    def is_revocable(self) -> bool:
        """True if error feedback is uncommitted, and this rank's own gradients are kept."""
        return self.average.commit is not None and self._own is not None

    def revoke(self) -> list[nn.Parameter]:
        """Restore this rank's own gradients, as `GradientAverager.revoke` says. Returns the parameters."""
        own = {id(p): grad for p, grad in self._own or ()}
        untouched = [p for _, p in self._named if self._is_untouched(p) or self._was_moved(p)]
        restored = {id(p) for p in untouched}
        for name, p in self._named:
            if p.grad is not None and id(p) not in restored and bool(local(p.grad).any()):
                allowed = "an optimizer step or zero_grad() after the change, or the change after the last backward"
                raise refusal("a backward after averages were changed", name, allowed)
        for p in untouched:
            p.grad = own.get(id(p))
        return untouched

    @property
    def is_in_gradients(self) -> bool:
        """True if error feedback is uncommitted and some `p.grad` still holds the average."""
        return self.average.commit is not None and any(self._is_untouched(p) for _, p in self._named)

    def used(self) -> set[str]:
        """Names of the parameters whose average is still in `p.grad`, neither None nor zeroed."""
        present = [(name, p, p.grad) for name, p in self._named if p.grad is not None]
        names = {name for name, _, _ in present}
        touched = [(name, local(grad)) for name, p, grad in present if p.numel() and not self._is_untouched(p)]
        if not touched:
            return names
        largest = torch.stack([grad.abs().max().float() for _, grad in touched]).tolist()
        zero = {name for (name, _), most in zip(touched, largest, strict=True) if most == 0}
        return names - {name for name in zero if bool(self.average.values(name).any())}


def _versions(grad: torch.Tensor) -> tuple[int, int]:
    """torch's counts of writes to `grad`. A DTensor and its local part have separate counts."""
    return grad._version, local(grad)._version
