"""One averaging step, top to bottom: collect, compensate, encode, exchange, decode, agree, commit, assign.

There are three kinds. `average_dense`: everything is sent, nothing is remembered. `compressed`: what is not sent is
remembered. `sparse_to_dense`: the first dense step after compressed ones sends all that is remembered too.
"""

from __future__ import annotations

import torch
from torch import nn

from lightning_gradcomp.averaging.exchange import Exchange, all_reduce_mean, read_flags, to_flags
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.local_weights import LocalWeights
from lightning_gradcomp.averaging.sharded import ShardedExchange
from lightning_gradcomp.averaging.stats import Stats
from lightning_gradcomp.averaging.topology import Topology
from lightning_gradcomp.averaging.worker_state import WorkerState
from lightning_gradcomp.averaging.workers import Ranks
from lightning_gradcomp.compressors.base import Compressor, Lossy
from lightning_gradcomp.compressors.decoded import Decoded, Dense, all_finite
from lightning_gradcomp.compressors.local_gradient import LocalGradient


def average_dense(compressor: Compressor, gradients: Gradients, ranks: Ranks, grad_scale: float, flag: bool) -> bool:
    """`p.grad` becomes the mean over the ranks, sent as the compressor's `wire_dtype`.

    Returns:
        Whether any rank's `flag` is set.
    """
    gradients.collect(1.0)
    present, saturate = [*gradients.present, flag], grad_scale == 1
    means, (*anywhere, flagged) = all_reduce_mean(ranks, gradients.flats, present, compressor.wire_dtype, saturate)
    good, flagged = _agreed_by_shards(ranks, means, flagged)
    if good:
        gradients.assign(Dense(means[0]), means[1], anywhere, 1.0)
    else:
        gradients.fill(torch.nan, anywhere)
    return flagged


def _agreed_by_shards(ranks: Ranks, means: list[torch.Tensor], flagged: bool) -> tuple[bool, bool]:
    """Whether the means are finite on every rank of a sharded replica, and whether `flagged` is set on any.

    Elsewhere all ranks have the same means, and see for themselves what is not finite.
    """
    if not ranks.shards:
        return True, flagged
    finite = torch.stack([all_finite(mean) for mean in means]).all()
    bad, flagged = read_flags(ranks.any_shard(torch.stack([~finite, to_flags([flagged], finite.device)[0]])))
    return not bad, flagged


class CompressedStep:
    """The compressed steps of one model on one rank, and what is remembered between them.

    Args:
        compressor: what is sent and remembered.
        gradients: the model's, laid out flat.
        ranks: who exchanges.
        topology: how messages travel.
        optimizer: for a compressor that owns the momentum.
    """

    def __init__(
        self,
        compressor: Lossy,
        gradients: Gradients,
        ranks: Ranks,
        topology: Topology,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.compressor, self.ranks, self.gradients = compressor, ranks, gradients
        self.state = WorkerState(compressor, gradients, ranks, topology, optimizer)
        self.local_weights = self._local_weights()
        self._buffer = torch.empty(0)

    def _local_weights(self) -> LocalWeights:
        # FSDP reads the memory of the shards, not the tensors that stand for them here.
        return LocalWeights(self.gradients.compressed, self.gradients.layout, in_place=self.gradients.sharded)

    def lay_out(self, gradients: Gradients) -> None:
        """A parameter was frozen or unfrozen: go on with these gradients; what is remembered follows by name."""
        self.state.lay_out(gradients)
        self.gradients, self._buffer = gradients, torch.empty(0)
        self.local_weights = self._local_weights()

    def use_local_weights(self) -> None:
        """Let the weights be without the steps that this worker has not sent, until `local_weights.restore`."""
        state = self.state.compressed
        scales = state.local_scales(self.ranks.workers)
        if scales is not None and not state.empty and state.unsent is not None:
            unsent = state.unsent.to(self.gradients.device)
            self.local_weights.use(unsent, scales, self.gradients.compressed_flat)

    def compressed(
        self, compressor: Lossy, topology: str, step: int, grad_scale: float, stats: Stats, flag: bool
    ) -> bool:
        """`p.grad` becomes the average of what the workers send; what they don't send is remembered.

        Where any rank's gradient is not finite, `p.grad` is NaN on all ranks, and all states stay as they were.

        Args:
            compressor: as it is in this step.
            topology: how messages travel in it.
            step: steps so far.
            grad_scale: the loss scale that is in the gradients.
            stats: where bytes and seconds are recorded.
            flag: of the caller's, for the others to know.

        Returns:
            Whether any rank's `flag` is set.
        """
        gradients, state = self.gradients, self.state
        state.use_topology(topology)
        *present, flag = self._average_inside(grad_scale, flag, stats)
        with stats.phase("compress"):
            state.onload()
            finite = self._compensate(grad_scale)
            flat, uncompressed = gradients.flats
            _fill_unless(finite, flat, 0.0)
        exchange = self._exchange(step, uncompressed, finite, [*present, flag], stats)
        mean, sent = compressor.average(flat, gradients.layout, exchange, state.compressed)
        exchange.finish()
        with stats.phase("decompress"):
            good, (*anywhere, flagged) = exchange.agreed(mean)
            if good:
                state.compressed.subtract(sent)
                state.dense.subtract(Dense(exchange.dense_sent))
                moved = self._names(anywhere)
                self._commit(moved)
                self._observe(exchange.dense_sent, exchange.dense_mean)
                self._use(mean, exchange.dense_mean, anywhere, moved, grad_scale)
            else:
                gradients.fill(torch.nan, anywhere)
            state.offload()
        return flagged

    def sparse_to_dense(self, grad_scale: float, stats: Stats, flag: bool) -> bool:
        """Send all that is remembered with the gradients, and give the optimizer its momentum back.

        Returns:
            Whether any rank's `flag` is set.
        """
        gradients, state = self.gradients, self.state
        *present, flag = self._average_inside(grad_scale, flag, stats)
        with stats.phase("compress"):
            state.onload()
            finite = self._compensate(grad_scale)
            if shard := state.remembering_shard:
                gradients.compressed_flat.add_(shard.whole(), alpha=self.ranks.workers)
            _fill_unless(finite, gradients.compressed_flat, torch.nan)
        # What is remembered of a parameter is sent also where it has no gradient any more.
        started = state.started
        present = [has or name in started for has, name in zip(present, gradients.names, strict=True)]
        own = state.compressed.next_optimizer_state
        flats = [*gradients.flats, *own.values()]
        with stats.phase("exchange"):
            [mean, mean_dense, *moments], (*anywhere, flagged) = all_reduce_mean(self.ranks, flats, [*present, flag])
        with stats.phase("decompress"):
            good = bool(all_finite(mean) & all_finite(mean_dense))
            agreed, flagged = _agreed_by_shards(self.ranks, [mean, mean_dense], flagged)
            if good and agreed:
                moved = self._names(anywhere)
                state.compressed.give_back(dict(zip(own, moments, strict=True)), moved)
                state.clear()
                self._use(Dense(mean), mean_dense, anywhere, moved, grad_scale)
            else:
                gradients.fill(torch.nan, anywhere)
            state.offload()
        stats.bytes_sent = stats.bytes_received = self.ranks.dense_traffic(sum(flat.nbytes for flat in flats))
        return flagged

    def _average_inside(self, grad_scale: float, flag: bool, stats: Stats) -> list[bool]:
        """Which gradients this worker has, and its flag. Several ranks are one worker: their mean is in the buffers."""
        flags = [*self.gradients.present, flag]
        if self.ranks.per_worker == 1:
            return flags
        self.gradients.collect(grad_scale)
        with stats.phase("exchange"):
            return self.ranks.average_inside(self.gradients.flats, flags)

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

    def _observe(self, own: torch.Tensor, mean: torch.Tensor) -> None:
        """Tell a state that asks for it of the uncompressed gradient: this worker's, and the mean, fp32 [d] each."""
        if self.state.compressed.makes_step:
            squares = torch.stack([own.square().sum(), mean.square().sum()])
            self.state.compressed.observe(*self.ranks.over_shards(squares))

    def _exchange(
        self, step: int, dense: torch.Tensor, finite: torch.Tensor, present: list[bool], stats: Stats
    ) -> Exchange:
        """This step's communication, as the topology says."""
        arguments = self.ranks, step, dense, self.compressor.dense_values, finite, present, stats, self._mean_buffer
        if shard := self.state.shard:
            return ShardedExchange(shard, self.state.topology == "server", *arguments)
        return Exchange(*arguments)

    def _mean_buffer(self) -> torch.Tensor:
        """For a mean that is not sparse, fp32 [n]. A new one at each step would take more time."""
        if self._buffer.numel() != self.gradients.layout.n:
            self._buffer = torch.empty_like(self.gradients.compressed_flat)
        return self._buffer

    def _use(
        self, mean: Decoded, dense: torch.Tensor, anywhere: list[bool], moved: set[str], grad_scale: float
    ) -> None:
        """Assign the averages to `p.grad`, or make the step where steps were averaged."""
        if self.state.compressed.makes_step:
            self.state.compressed.apply(mean, moved)
            self.gradients.assign_dense(dense, anywhere, grad_scale)
        else:
            self.gradients.assign(mean, dense, anywhere, grad_scale)
            if grad_scale == 1:
                self.state.compressed.assigned(mean)

    def _commit(self, moved: set[str]) -> None:
        gradients, state = self.gradients, self.state
        gradients.compressed_flat = state.compressed.commit(moved, gradients.compressed_flat)
        gradients.dense_flat = state.dense.commit(moved, gradients.dense_flat)
        state.commit_shard(moved)

    def _names(self, marked: list[bool]) -> set[str]:
        return {name for name, mark in zip(self.gradients.names, marked, strict=True) if mark}

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
