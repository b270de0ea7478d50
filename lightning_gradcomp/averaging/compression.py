"""A compressed step, from the local gradients to their average, with what is remembered in between."""

from __future__ import annotations

import torch
from torch import nn

from lightning_gradcomp.averaging.books import Books
from lightning_gradcomp.averaging.exchange import all_reduce_mean
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.message import Frame
from lightning_gradcomp.averaging.meter import Stats
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.relay import Relay
from lightning_gradcomp.averaging.takeover import adopt, hand_back, rules
from lightning_gradcomp.compressors.base import Lossy
from lightning_gradcomp.compressors.incoming import Incoming, all_finite
from lightning_gradcomp.compressors.memory import Velocity
from lightning_gradcomp.compressors.sent import Everything
from lightning_gradcomp.routes import Route

State = dict[str, dict[str, torch.Tensor]]


def fill_unless(finite: torch.Tensor, flat: torch.Tensor, value: float) -> None:
    """flat = value, unless `finite` (0-d bool)."""
    if flat.is_cuda:  # to ask would be to wait for the answer
        flat.masked_fill_(~finite, value)
    elif not finite:
        flat.fill_(value)


class Compression:
    """The books of one model's compressed steps on one rank.

    Args:
        compressor: what is sent and remembered.
        gradients: the model's, laid out flat.
        ranks: who exchanges.
        route: how it travels. With "auto", as `travel` says.
        optimizer: where a compressor that owns the momentum takes it from.
    """

    def __init__(
        self,
        compressor: Lossy,
        gradients: Gradients,
        ranks: Ranks,
        route: Route,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.compressor, self.ranks, self.optimizer = compressor, ranks, optimizer
        self.books = Books(compressor, gradients, ranks, route)
        self._take(gradients)

    def _take(self, gradients: Gradients) -> None:
        self.gradients = gradients
        self._traffic: dict[str, tuple[float, int]] = {}
        self._mean = torch.empty_like(gradients.compressed_flat)

    def lay_out(self, gradients: Gradients) -> None:
        """A parameter was frozen or unfrozen: go on with these gradients; what is remembered follows by name."""
        self.books.lay_out(gradients)
        self._take(gradients)

    def traffic(self, density: float, topology: str) -> int:
        """Bytes that a compressed step sends between workers; of the rank that sends the most."""
        if self._traffic.get(topology, (None,))[0] != density:
            self._traffic[topology] = density, self._count(density, topology)
        return self._traffic[topology][1]

    def _count(self, density: float, topology: str) -> int:
        if owners := self.books.owners_of(topology, torch.device("meta")):
            return owners.traffic(density, 2 + len(self.gradients.parameters))
        total = 0
        for how, length in self.messages(density):
            if how == "gather":
                total += self.ranks.gather_traffic(length)
            elif how == "mean":
                total += self.ranks.add_traffic(length, self.gradients.flat.device)
            else:
                total += self.ranks.maximum_traffic(length)
        return total

    def messages(self, density: float) -> list[tuple[str, int]]:
        """What a step exchanges: as `Lossy.messages`, with all that travels along with the first payload."""
        dense, flags, messages = self.gradients.dense_layout.n, 2 + len(self.gradients.parameters), []
        for how, payload in self.compressor.messages(self.gradients.layout, density):
            if how == "maximum":
                messages.append((how, payload))
                continue
            frame = Frame(dense, self.compressor.dense_values, payload, flags)
            messages.append((how, frame.length if how == "gather" else payload + 4 * (dense + flags)))
            dense = flags = 0  # they have travelled
        return messages

    def _join(self, grad_scale: float, flag: bool, stats: Stats) -> list[bool]:
        """Which gradients this worker has, and its flag. Several ranks are one worker: their mean lies flat then."""
        marks = [*self.gradients.present, flag]
        if self.ranks.per_worker == 1:
            return marks
        self.gradients.collect(grad_scale)
        with stats.phase("exchange"):
            return self.ranks.join(self.gradients.flat, marks)

    def _compensate(
        self, present: list[bool], grad_scale: float
    ) -> tuple[torch.Tensor, list[bool], torch.Tensor, torch.Tensor]:
        """Collect the gradients.

        Returns:
            Whether they are finite (0-d bool), what this worker adds to, and what should be sent: compressed and dense.
        """
        gradients, memory, alone = self.gradients, self.books.memory, self.ranks.per_worker == 1
        if alone and not self.compressor.clips:
            gradients.collect_dense(grad_scale)
            incoming = gradients.incoming(grad_scale)
        else:
            if alone:
                gradients.collect(grad_scale)
            self.compressor.clip_local(gradients.flat, self.ranks.workers)
            incoming = Incoming.of(gradients.compressed_flat, gradients.layout)
        optimizer = None
        if self.optimizer and isinstance(memory, Velocity):
            optimizer = self.optimizer
            adopt(optimizer, gradients.compressed, gradients.layout.names, memory)
        momenta = rules(optimizer, gradients.compressed)
        started = memory.started | self.books.dense_memory.started
        moves = [has or name in started for has, name in zip(present, gradients.names, strict=True)]
        moving = self._names(moves)
        weights = [parameter.detach().reshape(-1) for parameter in gradients.compressed] if optimizer else []
        outgoing = memory.compensate(incoming, momenta, moving, weights)
        incoming_dense = Incoming.of(gradients.dense_flat, gradients.dense_layout)
        dense = self.books.dense_memory.compensate(incoming_dense, [], moving)
        return incoming.finite & incoming_dense.finite, moves, outgoing, dense

    def _names(self, marked: list[bool]) -> set[str]:
        return {name for name, mark in zip(self.gradients.names, marked, strict=True) if mark}

    def average(self, density: float, grad_scale: float, stats: Stats, flag: bool) -> bool:
        """A compressed step: `p.grad` becomes the average of what the ranks send; what they don't is remembered.

        Returns:
            Whether any rank's `flag` is set.
        """
        gradients, memory = self.gradients, self.books.memory
        *present, flag = self._join(grad_scale, flag, stats)
        with stats.phase("compress"):
            self.books.fetch()
            finite, moves, outgoing, dense = self._compensate(present, grad_scale)
            fill_unless(finite, outgoing, 0.0)
        values = self.compressor.dense_values
        exchange = Relay(self.ranks, dense, finite, [*moves, flag], stats, self._mean, values)
        if self.books.owners:
            mean, sent = self.books.owners.average(outgoing, density, exchange, memory)
        else:
            mean, sent = self.compressor.average(outgoing, gradients.layout, density, exchange, memory)
        with stats.phase("decompress"):
            good, (*anywhere, flagged) = exchange.agreed(mean)
            if good:
                memory.forget(sent)
                self.books.dense_memory.forget(Everything(exchange.dense_sent))
                for books in (memory, self.books.dense_memory):
                    books.commit(self._names(anywhere))
                if self.books.owners:
                    self.books.owners.commit()
                gradients.assign(mean, exchange.dense_mean, anywhere, grad_scale)
            else:
                gradients.flat.fill_(torch.nan)
                gradients.assign(Everything(gradients.compressed_flat), gradients.dense_flat, anywhere, 1.0)
            self.books.put_away()
        return flagged

    def settle(self, grad_scale: float, stats: Stats, flag: bool) -> bool:
        """From sparse back to dense: send all that is remembered, and give the optimizer its momentum back.

        Returns:
            Whether any rank's `flag` is set.
        """
        gradients, memory = self.gradients, self.books.memory
        *present, flag = self._join(grad_scale, flag, stats)
        with stats.phase("compress"):
            self.books.fetch()
            finite, moves, outgoing, dense = self._compensate(present, grad_scale)
            gradients.dense_flat.copy_(dense)
            gradients.compressed_flat.copy_(outgoing)
            if owners := self.books.remembering:
                gradients.compressed_flat.add_(owners.spread(), alpha=self.ranks.workers)
            fill_unless(finite, gradients.compressed_flat, torch.nan)
        flats = [gradients.flat, memory.coming_momentum] if isinstance(memory, Velocity) else [gradients.flat]
        with stats.phase("exchange"):
            [mean, *momentum], (*anywhere, flagged) = all_reduce_mean(self.ranks, flats, [*moves, flag])
        with stats.phase("decompress"):
            if all_finite(mean):
                if self.optimizer and momentum:
                    hand_back(self.optimizer, gradients.compressed, gradients.layout.views(momentum[0]), anywhere)
                self.books.clear()
            compressed, dense = mean.split([gradients.layout.n, gradients.dense_layout.n])
            gradients.assign(Everything(compressed), dense, anywhere, grad_scale)
            self.books.put_away()
        stats.bytes_sent = stats.bytes_received = self.ranks.dense_traffic(sum(flat.nbytes for flat in flats))
        return flagged

    def momentum_buffers(self) -> dict[nn.Parameter, torch.Tensor]:
        """Parameter -> mean over ranks of the momentum that is kept here instead of in the optimizer. Collective."""
        memory, gradients = self.books.memory, self.gradients
        if not isinstance(memory, Velocity) or memory.empty:
            return {}
        [momentum], _ = all_reduce_mean(self.ranks, [memory.u.to(gradients.flat.device)], [])
        views = gradients.layout.views(momentum)
        named = zip(gradients.layout.names, gradients.compressed, views, strict=True)
        return {parameter: view.clone() for name, parameter, view in named if name in memory.started}
