"""One average, top to bottom: collect, compensate, encode, exchange, decode, agree, assign. The step commits.

There are three kinds. `average_dense` sends everything and keeps nothing. `compressed` keeps what it does not send.
`sparse_to_dense`, the first dense average after compressed ones, sends everything that was kept too.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from lightning_gradcomp.averaging.exchange import CALLER_FLAGS, Exchange, all_reduce_mean, read_flags, to_flags
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.local_weights import LocalWeights
from lightning_gradcomp.averaging.memory import Memory
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.stats import Stats
from lightning_gradcomp.averaging.topology import Topology
from lightning_gradcomp.averaging.two_phase import TwoPhaseExchange
from lightning_gradcomp.compressors.base import Compressor, LossyCompressor
from lightning_gradcomp.compressors.decoded import Decoded, Dense, all_finite, by_tensor
from lightning_gradcomp.compressors.local_gradient import LocalGradient


class Flags(NamedTuple):
    """What a rank tells the others along with its gradients; after an average, True if any rank did.

    Args:
        stop: of the averager's user, such as a SIGTERM.
        changed: other parameters train than before. The average is then not written, and has to be made again.
    """

    stop: bool = False
    changed: bool = False


@dataclass(frozen=True)
class Average:
    """What became of an average.

    Args:
        flags: of all ranks.
        names: parameters whose `p.grad` was written.
        commit: puts the state after this average in force, for parameters that the optimizer has stepped. None: the
            state does not change, since a gradient was not finite.
        values: name -> what was averaged of it, 1-D; some or all elements.
    """

    flags: Flags
    names: frozenset[str] = frozenset()
    commit: Callable[[Set[str]], None] | None = None
    values: Callable[[str], torch.Tensor] = lambda name: torch.empty(0, dtype=torch.float32)


def average_dense(compressor: Compressor, gradients: Gradients, ranks: Ranks, grad_scale: float, flags: Flags) -> Flags:
    """`p.grad` becomes the mean over the ranks, sent as the compressor's `wire_dtype`. Returns all ranks' flags."""
    gradients.collect(1.0)
    present, saturate = [*gradients.present, *flags], grad_scale == 1
    means, found = all_reduce_mean(ranks, gradients.flats, present, compressor.wire_dtype, saturate)
    anywhere, flags = _split(found)
    good, flags = _agreed_by_shards(ranks, means, flags)
    if flags.changed:
        return flags
    if good:
        gradients.assign(Dense(means[0]), means[1], anywhere, 1.0, [1.0] * len(gradients.compressed))
    else:
        gradients.fill(torch.nan, anywhere)
    return flags


def _split(found: list[bool]) -> tuple[list[bool], Flags]:
    """Which parameters have a gradient on any rank, and the flags."""
    return found[:-CALLER_FLAGS], Flags(*found[-CALLER_FLAGS:])


def _agreed_by_shards(ranks: Ranks, means: list[torch.Tensor], flags: Flags) -> tuple[bool, Flags]:
    """True if the means are finite on every rank of a sharded replica; and which flags are set on any.

    Elsewhere all ranks have the same means, and see for themselves what is not finite.
    """
    if not ranks.shards:
        return True, flags
    finite = torch.stack([all_finite(mean) for mean in means]).all()
    bad, *found = read_flags(ranks.any_shard(torch.cat([~finite.view(1), to_flags(list(flags), finite.device)])))
    return not bad, Flags(*found)


class CompressedStep:
    """The compressed averages of one model on one rank, with their error feedback.

    Args:
        compressor: what is sent and kept.
        gradients: the model's, laid out flat.
        ranks: who exchanges.
        topology: how messages travel.
        optimizer: for a compressor that owns the momentum.
    """

    def __init__(
        self,
        compressor: LossyCompressor,
        gradients: Gradients,
        ranks: Ranks,
        topology: Topology,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.compressor, self.ranks, self.gradients = compressor, ranks, gradients
        self.state = Memory(compressor, gradients, ranks, topology, optimizer)
        self.local_weights = self._local_weights()
        self._buffer = torch.empty(0, dtype=torch.float32)

    def _local_weights(self) -> LocalWeights:
        # FSDP reads the memory of the shards, not the tensors that stand for them here.
        return LocalWeights(self.gradients.compressed, self.gradients.layout, in_place=self.gradients.sharded)

    def lay_out(self, gradients: Gradients) -> None:
        """Other parameters train: go on with these gradients; error feedback follows by name."""
        self.state.lay_out(gradients)
        compares_all = self.local_weights.compares_all
        self.gradients, self._buffer = gradients, torch.empty(0, dtype=torch.float32)
        self.local_weights = self._local_weights()
        self.local_weights.compares_all = compares_all

    def use_local_weights(self) -> None:
        """Let the weights be without the steps that this worker has not sent, until `local_weights.restore`."""
        state = self.state.compressed
        scales = state.local_scales(self.ranks.workers)
        if scales is not None and not state.empty and state.unsent is not None:
            unsent = state.unsent.to(self.gradients.device)
            self.local_weights.use(unsent, scales, self.gradients.compressed_flat)

    def compressed(
        self, compressor: LossyCompressor, topology: str, step: int, grad_scale: float, stats: Stats, flags: Flags
    ) -> Average:
        """`p.grad` becomes the average of what the workers send; what they don't send stays with them.

        Where any rank's gradient is not finite, `p.grad` is NaN on all ranks, and all states stay as they were.

        Args:
            compressor: as it is in this step.
            topology: how messages travel in it.
            step: steps so far.
            grad_scale: the loss scale that is in the gradients.
            stats: where bytes and seconds are recorded.
            flags: for the others to know.
        """
        gradients, state = self.gradients, self.state
        state.use_topology(topology)
        present = self._average_inside(grad_scale, flags, stats)
        with stats.phase("compress"):
            state.onload()
            finite = self._compensate(grad_scale)
            flat, uncompressed = gradients.flats
            _fill_unless(finite, flat, 0.0)
        exchange = self._exchange(step, uncompressed, finite, present, stats)
        mean, sent = compressor.average(flat, gradients.layout, exchange, state.compressed)
        exchange.finish()
        with stats.phase("decompress"):
            good, found = exchange.agreed(mean)
            anywhere, flags = _split(found)
            if flags.changed:
                return Average(flags)
            if not good:
                gradients.fill(torch.nan, anywhere)
                return Average(flags, self._names(anywhere))
            state.compressed.subtract(sent)
            state.dense.subtract(Dense(exchange.dense_sent))
            self._assign(mean, exchange.dense_mean, anywhere, grad_scale)
            norms = self._norms(exchange.dense_sent, exchange.dense_mean)

        def commit(stepped: Set[str]) -> None:
            gradients.compressed_flat = state.compressed.commit(stepped, gradients.compressed_flat)
            gradients.dense_flat = state.dense.commit(stepped, gradients.dense_flat)
            state.commit_partition(stepped - state.compressed.withheld)
            if norms is not None:
                state.compressed.observe(*norms)
            state.offload()

        return Average(flags, self._names(anywhere), commit, self._values_of(mean, exchange.dense_mean))

    def sparse_to_dense(self, grad_scale: float, stats: Stats, flags: Flags) -> Average:
        """Send everything that was kept with the gradients, and hand the momentum over to the optimizer."""
        gradients, state = self.gradients, self.state
        present = self._average_inside(grad_scale, flags, stats)
        with stats.phase("compress"):
            state.onload()
            finite = self._compensate(grad_scale)
            if partition := state.partition_in_use:
                gradients.compressed_flat.add_(partition.whole(), alpha=self.ranks.workers)
            _fill_unless(finite, gradients.compressed_flat, torch.nan)
        # What was kept of a parameter is sent also where it has no gradient any more.
        started = state.started
        present = [
            has or name in started for has, name in zip(present[:-CALLER_FLAGS], gradients.names, strict=True)
        ] + present[-CALLER_FLAGS:]
        own = state.compressed.next_optimizer_state
        flats = [*gradients.flats, *own.values()]
        with stats.phase("exchange"):
            [mean, mean_dense, *moments], found = all_reduce_mean(self.ranks, flats, present)
        anywhere, flags = _split(found)
        stats.bytes_sent = stats.bytes_received = self.ranks.dense_traffic(sum(flat.nbytes for flat in flats))
        with stats.phase("decompress"):
            good = bool(all_finite(mean) & all_finite(mean_dense))
            agreed, flags = _agreed_by_shards(self.ranks, [mean, mean_dense], flags)
            if flags.changed:
                return Average(flags)
            if not (good and agreed):
                gradients.fill(torch.nan, anywhere)
                return Average(flags, self._names(anywhere))
            self._assign(Dense(mean), mean_dense, anywhere, grad_scale)

        def commit(stepped: Set[str]) -> None:
            state.compressed.hand_over(dict(zip(own, moments, strict=True)), stepped)
            state.clear(stepped - state.compressed.withheld)
            state.offload()

        return Average(flags, self._names(anywhere), commit, self._values_of(Dense(mean), mean_dense))

    def _average_inside(self, grad_scale: float, flags: Flags, stats: Stats) -> list[bool]:
        """Which gradients this worker has, and its flags. Several ranks of a worker leave their mean in the buffers."""
        present = [*self.gradients.present, *flags]
        if self.ranks.per_worker == 1:
            return present
        self.gradients.collect(grad_scale)
        with stats.phase("exchange"):
            return self.ranks.average_inside(self.gradients.flats, present)

    def _compensate(self, grad_scale: float) -> torch.Tensor:
        """Let the buffers hold what should be sent. Whether the gradients are finite: 0-d bool."""
        gradients, state, alone = self.gradients, self.state, self.ranks.per_worker == 1
        if alone and self.compressor.clip_norm is None:
            gradients.collect_dense(grad_scale)
            local = gradients.local_gradient(grad_scale)
        else:
            if alone:
                gradients.collect(grad_scale)
            self.compressor.clip_local(gradients.flats, self._norm(), self.ranks.workers)
            local = LocalGradient.of(gradients.compressed_flat, gradients.layout)
        local_dense = LocalGradient.of(gradients.dense_flat, gradients.dense_layout)
        state.compressed.compensate(local, gradients.compressed_flat)
        state.dense.compensate(local_dense, gradients.dense_flat)
        return local.finite & local_dense.finite

    def _norm(self) -> torch.Tensor:
        """The norm of this worker's whole gradient, which is in the buffers: 0-d."""
        norms = torch.stack([flat.norm() for flat in self.gradients.flats])
        if not self.ranks.shards:
            return torch.linalg.vector_norm(norms)
        return self.ranks.over_shards(norms.square().sum()).sqrt()

    def _norms(self, own: torch.Tensor, mean: torch.Tensor) -> torch.Tensor | None:
        """The squared norms of the uncompressed gradient, of this worker and of the mean (fp32 [d] each): [2].

        None for a state that does not ask for them.
        """
        if not self.state.compressed.accumulates_steps:
            return None
        return self.ranks.over_shards(torch.stack([own.square().sum(), mean.square().sum()]))

    def _exchange(
        self, step: int, dense: torch.Tensor, finite: torch.Tensor, present: list[bool], stats: Stats
    ) -> Exchange:
        """This step's communication, as the topology says."""
        arguments = self.ranks, step, dense, self.compressor.dense_values, finite, present, stats, self._mean_buffer
        if partition := self.state.partition:
            return TwoPhaseExchange(partition, self.state.topology == "server", *arguments)
        return Exchange(*arguments)

    def _mean_buffer(self) -> torch.Tensor:
        """For a mean that is not sparse, fp32 [n]. A new one at each step would take more time."""
        if self._buffer.numel() != self.gradients.layout.n:
            self._buffer = torch.empty_like(self.gradients.compressed_flat)
        return self._buffer

    def _assign(self, mean: Decoded, dense: torch.Tensor, anywhere: list[bool], grad_scale: float) -> None:
        """Write the averages into `p.grad`: of steps, as update directions that the learning rate multiplies again."""
        rates = self.state.compressed.learning_rates()
        factors = [grad_scale] * len(self.gradients.compressed)
        if rates is not None:
            factors = [grad_scale / rate if rate else 0.0 for rate in rates]
        self.gradients.assign(mean, dense, anywhere, grad_scale, factors)

    def _values_of(self, mean: Decoded, dense: torch.Tensor) -> Callable[[str], torch.Tensor]:
        layout, dense_layout = self.gradients.layout, self.gradients.dense_layout

        def values(name: str) -> torch.Tensor:
            if name in dense_layout.names:
                start, stop = dense_layout.bounds[dense_layout.names.index(name)]
                return dense[start:stop]
            return list(by_tensor(mean, layout))[layout.names.index(name)][1]

        return values

    def _names(self, marked: list[bool]) -> frozenset[str]:
        return frozenset(name for name, mark in zip(self.gradients.names, marked, strict=True) if mark)

    def optimizer_state(self) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
        """Parameter -> torch's name -> mean over ranks of the optimizer's state that is kept here. Collective."""
        state, gradients = self.state.compressed, self.gradients
        own = {} if state.empty else state.optimizer_state
        if not own:
            return {}
        means, _ = all_reduce_mean(self.ranks, [flat.to(gradients.device) for flat in own.values()], [])
        named = list(zip(gradients.layout.names, gradients.compressed, strict=True))
        kept: dict[nn.Parameter, dict[str, torch.Tensor]] = {p: {} for name, p in named if name in state.started}
        for kind, mean in zip(own, means, strict=True):
            for (_, parameter), view in zip(named, gradients.layout.views(mean), strict=True):
                if parameter in kept:
                    kept[parameter][kind] = torch.empty_like(parameter, dtype=view.dtype).copy_(view)
        return kept


def _fill_unless(finite: torch.Tensor, flat: torch.Tensor, value: float) -> None:
    """flat = value, unless `finite` (0-d bool)."""
    if flat.is_cuda:  # to look at it would be to wait for it
        flat.masked_fill_(~finite, value)
    elif not finite:
        flat.fill_(value)
