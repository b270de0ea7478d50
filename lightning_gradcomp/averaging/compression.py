"""A compressed step, from the local gradients to their average, with what is remembered in between."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lightning_gradcomp.averaging.elastic import OWNED
from lightning_gradcomp.averaging.exchange import all_reduce_mean
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.message import Frame
from lightning_gradcomp.averaging.meter import Stats
from lightning_gradcomp.averaging.takeover import adopt, hand_back, rules
from lightning_gradcomp.averaging.topologies import AllGather, TwoPhase, dense_traffic
from lightning_gradcomp.averaging.two_phase import Owners, Relay
from lightning_gradcomp.compressors.base import Codec, Lossy
from lightning_gradcomp.compressors.incoming import Incoming, all_finite
from lightning_gradcomp.compressors.memory import Memory, Residual, Velocity
from lightning_gradcomp.compressors.sent import Everything

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
        topology: how it travels.
        optimizer: where a compressor that owns the momentum takes it from.
    """

    def __init__(
        self, compressor: Lossy, gradients: Gradients, topology: AllGather, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self.compressor, self.topology, self.optimizer = compressor, topology, optimizer
        self._parked: State = {}  # of parameters that are frozen just now
        self._take(gradients)

    def _take(self, gradients: Gradients) -> None:
        self.gradients = gradients
        self.memory, self.dense_memory, self.owners = self._blank_books()
        self._mean = torch.empty_like(gradients.compressed_flat)

    @property
    def empty(self) -> bool:
        """Whether nothing is remembered."""
        return self.memory.empty and self.dense_memory.empty and not (self.owners and self.owners.used)

    def _blank_books(self) -> tuple[Memory, Memory, Owners | None]:
        gradients, device = self.gradients, self.gradients.flat.device
        dense = Memory if self.compressor.dense_values == "fp32" else Residual
        memory = self.compressor.memory(gradients.layout, device, self.topology.rank)
        owners = None
        if isinstance(self.topology, TwoPhase):
            assert isinstance(self.compressor, Codec)  # others are refused
            owners = Owners(self.compressor, gradients.layout, gradients.dense_layout.n, self.topology, device)
        return memory, dense(gradients.dense_layout, device), owners

    def lay_out(self, gradients: Gradients) -> None:
        """A parameter was frozen or unfrozen: go on with these gradients; the state follows by name.

        Owners will own other stretches, so what they remember goes back into what ranks remember.
        """
        if self.owners and self.owners.used:
            self.memory.absorb(self.owners.spread().mul_(self.topology.world))
            self.owners.clear()
        state = self.state_dict()
        self._take(gradients)
        self.load_state_dict(state)

    def traffic(self, density: float) -> int:
        """Bytes that a compressed step sends; of the rank that sends the most."""
        dense, flags = self.gradients.dense_layout.n, 2 + len(self.gradients.parameters)
        if self.owners:
            return self.owners.traffic(density, flags)
        total = 0
        for how, payload in self.compressor.messages(self.gradients.layout, density):
            if how == "gather":
                frame = Frame(dense, self.compressor.dense_values, payload, flags)
                total += self.topology.traffic(frame.length)
            elif how == "mean":
                total += dense_traffic(payload + 4 * (dense + flags), self.topology.world)
            else:
                total += dense_traffic(payload, self.topology.world)
                continue
            dense = flags = 0  # they have travelled
        return total

    def _compensate(self, grad_scale: float) -> tuple[torch.Tensor, list[bool], torch.Tensor, torch.Tensor]:
        """Collect the gradients.

        Returns:
            Whether they are finite (0-d bool), what this rank adds to, and what should be sent: compressed and dense.
        """
        gradients, memory = self.gradients, self.memory
        if self.compressor.clips:
            gradients.collect(grad_scale)
            self.compressor.clip_local(gradients.flat, self.topology.world)
            incoming = Incoming.of(gradients.compressed_flat, gradients.layout)
        else:
            gradients.collect_dense(grad_scale)
            incoming = gradients.incoming(grad_scale)
        optimizer = None
        if self.optimizer and isinstance(memory, Velocity):
            optimizer = self.optimizer
            adopt(optimizer, gradients.compressed, gradients.layout.names, memory)
        momenta = rules(optimizer, gradients.compressed)
        started = memory.started | self.dense_memory.started
        moves = [has or name in started for has, name in zip(gradients.present, gradients.names, strict=True)]
        moving = self._names(moves)
        weights = [parameter.detach().reshape(-1) for parameter in gradients.compressed] if optimizer else []
        outgoing = memory.compensate(incoming, momenta, moving, weights)
        incoming_dense = Incoming.of(gradients.dense_flat, gradients.dense_layout)
        dense = self.dense_memory.compensate(incoming_dense, [], moving)
        return incoming.finite & incoming_dense.finite, moves, outgoing, dense

    def _names(self, marked: list[bool]) -> set[str]:
        return {name for name, mark in zip(self.gradients.names, marked, strict=True) if mark}

    def describe(self) -> str:
        """What is compressed, and what a step sends once the warm-up is over."""
        gradients, sparsity = self.gradients, self.compressor.final_sparsity
        if not gradients.compressed:
            return "no tensor is large enough to be compressed, all travel dense"
        at_sparsity = f"at sparsity {sparsity:g} " if hasattr(self.compressor, "sparsity") else ""
        return (
            f"{len(gradients.compressed)} tensors ({gradients.layout.n:,} elements) compressed, "
            f"{len(gradients.dense)} ({gradients.dense_layout.n:,}) dense in the same message; "
            f"{at_sparsity}{self.traffic(1 - sparsity):,} bytes sent a step"
        )

    def average(self, density: float, grad_scale: float, stats: Stats, flag: bool) -> bool:
        """A compressed step: `p.grad` becomes the average of what the ranks send; what they don't is remembered.

        Returns:
            Whether any rank's `flag` is set.
        """
        gradients, memory = self.gradients, self.memory
        with stats.phase("compress"):
            finite, present, outgoing, dense = self._compensate(grad_scale)
            fill_unless(finite, outgoing, 0.0)
        values = self.compressor.dense_values
        exchange = Relay(self.topology, dense, finite, [*present, flag], stats, self._mean, values)
        if self.owners:
            mean, sent = self.owners.average(outgoing, density, exchange)
        else:
            mean, sent = self.compressor.average(outgoing, gradients.layout, density, exchange, memory)
        with stats.phase("decompress"):
            good, (*anywhere, flagged) = exchange.agreed(mean)
            if good:
                memory.forget(sent)
                self.dense_memory.forget(Everything(exchange.dense_sent))
                for books in (memory, self.dense_memory):
                    books.commit(self._names(anywhere))
                if self.owners:
                    self.owners.commit()
                gradients.assign(mean, exchange.dense_mean, anywhere, grad_scale)
            else:
                gradients.flat.fill_(torch.nan)
                gradients.assign(Everything(gradients.compressed_flat), gradients.dense_flat, anywhere, 1.0)
        return flagged

    def settle(self, grad_scale: float, stats: Stats, flag: bool) -> bool:
        """From sparse back to dense: send all that is remembered, and give the optimizer its momentum back.

        Returns:
            Whether any rank's `flag` is set.
        """
        gradients, memory = self.gradients, self.memory
        with stats.phase("compress"):
            finite, present, outgoing, dense = self._compensate(grad_scale)
            gradients.dense_flat.copy_(dense)
            gradients.compressed_flat.copy_(outgoing)
            if self.owners:
                gradients.compressed_flat.add_(self.owners.spread(), alpha=self.topology.world)
            fill_unless(finite, gradients.compressed_flat, torch.nan)
        flats = [gradients.flat, memory.coming_momentum] if isinstance(memory, Velocity) else [gradients.flat]
        with stats.phase("exchange"):
            [mean, *momentum], (*anywhere, flagged) = all_reduce_mean(self.topology, flats, [*present, flag])
        with stats.phase("decompress"):
            if all_finite(mean):
                if self.optimizer and momentum:
                    hand_back(self.optimizer, gradients.compressed, gradients.layout.views(momentum[0]), anywhere)
                for books in (memory, self.dense_memory, *([self.owners] if self.owners else [])):
                    books.clear()
            compressed, dense = mean.split([gradients.layout.n, gradients.dense_layout.n])
            gradients.assign(Everything(compressed), dense, anywhere, grad_scale)
        traffic = dense_traffic(4 * sum(flat.numel() for flat in flats), self.topology.world)
        stats.bytes_sent = stats.bytes_received = traffic
        return flagged

    def momentum_buffers(self) -> dict[nn.Parameter, torch.Tensor]:
        """Parameter -> mean over ranks of the momentum that is kept here instead of in the optimizer. Collective."""
        memory, gradients = self.memory, self.gradients
        if not isinstance(memory, Velocity) or memory.empty:
            return {}
        [momentum], _ = all_reduce_mean(self.topology, [memory.u], [])
        views = gradients.layout.views(momentum)
        named = zip(gradients.layout.names, gradients.compressed, views, strict=True)
        return {parameter: view.clone() for name, parameter, view in named if name in memory.started}

    def state_dict(self) -> State:
        """Kind -> parameter name -> tensor, frozen parameters included."""
        dense = {f"dense_{kind}": parts for kind, parts in self.dense_memory.state_dict().items()}
        kinds = {**self.memory.state_dict(), **dense}
        if self.owners and self.owners.used:
            kinds[OWNED] = self.owners.state_dict()
        return {kind: {**self._parked.get(kind, {}), **parts} for kind, parts in kinds.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]], owners: int = 1) -> None:
        """Replace everything that is remembered; what belongs to a frozen parameter is kept until it trains again.

        Args:
            state: kind -> parameter name -> tensor.
            owners: among how many owners the kind `OWNED` is divided. Where that has changed, or there are none here,
                the ranks remember what the owners did.

        Raises:
            ValueError: a tensor whose shape is not its parameter's.
        """
        memory, dense_memory, own = self._blank_books()  # so that an error leaves those of before as they were
        memory.load_state_dict(state)
        dense = {kind.removeprefix("dense_"): parts for kind, parts in state.items() if kind.startswith("dense_")}
        dense_memory.load_state_dict({"residual": {}, **dense})
        if OWNED in state and own and owners == self.topology.world:
            own.load_state_dict(state[OWNED])
        elif OWNED in state:
            memory.absorb(self.gradients.layout.join(state[OWNED], self.gradients.flat.device).mul_(owners))
        self.memory, self.dense_memory, self.owners = memory, dense_memory, own
        frozen = self.gradients.frozen
        self._parked = {kind: {n: t for n, t in parts.items() if n in frozen} for kind, parts in state.items()}
