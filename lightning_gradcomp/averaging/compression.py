"""A compressed step, from the local gradients to their average, with what is remembered in between."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_gradcomp.averaging.exchange import Exchange, all_reduce_mean, message_bytes
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.meter import Stats
from lightning_gradcomp.averaging.takeover import adopt, decay, hand_back, rules
from lightning_gradcomp.averaging.topologies import AllGather, dense_traffic
from lightning_gradcomp.compressors.base import Codec

State = dict[str, dict[str, torch.Tensor]]


class Compression:
    """The books of one model's compressed steps on one rank.

    Args:
        compressor: what is sent and remembered.
        gradients: the model's, laid out flat.
        topology: how it travels.
        optimizer: where a compressor that owns the momentum takes it from.
    """

    def __init__(
        self, compressor: Codec, gradients: Gradients, topology: AllGather, optimizer: torch.optim.Optimizer | None
    ) -> None:
        self.compressor, self.topology, self.optimizer = compressor, topology, optimizer
        self._parked: State = {}  # of parameters that are frozen just now
        self.gradients = gradients
        self.memory: Any = compressor.memory(gradients.layout, gradients.flat.device)

    def lay_out(self, gradients: Gradients) -> None:
        """A parameter was frozen or unfrozen: go on with these gradients; the state follows by name."""
        state = self.state_dict()
        self.gradients = gradients
        self.memory = self.compressor.memory(gradients.layout, gradients.flat.device)
        self.load_state_dict(state)

    def traffic(self, density: float) -> int:
        """Bytes that a compressed step sends."""
        payload = self.compressor.payload_bytes(self.gradients.layout, density)
        return self.topology.traffic(
            message_bytes(self.gradients.dense_layout.n, payload, 1 + len(self.gradients.parameters))
        )

    def _compensate(self, grad_scale: float) -> tuple[bool, list[bool], torch.Tensor]:
        """Collect the gradients; (whether they are finite, what this rank adds to, what should be sent)."""
        gradients, memory, names = self.gradients, self.memory, self.gradients.layout.names
        present = gradients.collect(grad_scale)
        if self.optimizer and self.compressor.owns_momentum:
            adopt(self.optimizer, gradients.compressed, names, memory)
        if not torch.isfinite(gradients.flat.sum()):
            return False, present, torch.zeros_like(gradients.compressed_flat)
        self.compressor.clip_local(gradients.flat, self.topology.world)
        momenta = rules(self.optimizer, gradients.compressed)
        present = [
            has or more for has, more in zip_longest(present, (n in memory.started for n in names), fillvalue=False)
        ]
        moving = {name for name, has in zip(names, present, strict=False) if has}
        if self.compressor.owns_momentum:
            views = gradients.layout.views(gradients.compressed_flat)
            decay(views, gradients.compressed, momenta, [name in moving for name in names])
        return True, present, memory.compensate(gradients.compressed_flat, momenta, moving)

    def describe(self) -> str:
        """What is compressed, and what a step sends once the warm-up is over."""
        gradients, sparsity = self.gradients, self.compressor.final_sparsity
        return (
            f"{len(gradients.compressed)} tensors ({gradients.layout.n:,} elements) compressed, "
            f"{len(gradients.dense)} ({gradients.dense_layout.n:,}) dense in the same message; "
            f"at sparsity {sparsity:g} {self.traffic(1 - sparsity):,} bytes sent a step by {self.topology.name}"
        )

    def average(self, density: float, grad_scale: float, stats: Stats) -> None:
        """A compressed step: `p.grad` becomes the average of what the ranks send; what they don't is remembered."""
        gradients, memory = self.gradients, self.memory
        with stats.phase("compress"):
            finite, present, outgoing = self._compensate(grad_scale)
        exchange = Exchange(self.topology, gradients.dense_flat, finite, present, stats)
        mean, sent = self.compressor.average(outgoing, gradients.layout, density, exchange)
        with stats.phase("decompress"):
            if exchange.finite:
                memory.forget(sent)
                names = gradients.layout.names
                memory.commit({name for name, has in zip(names, exchange.anywhere, strict=False) if has})
                gradients.compressed_flat.copy_(mean)
                gradients.dense_flat.copy_(exchange.dense_mean)
            else:
                gradients.flat.fill_(torch.nan)
            gradients.assign(exchange.anywhere, grad_scale)

    def settle(self, grad_scale: float, stats: Stats) -> None:
        """From sparse back to dense: send all that is remembered, and give the optimizer its momentum back."""
        gradients, memory = self.gradients, self.memory
        with stats.phase("compress"):
            finite, present, outgoing = self._compensate(grad_scale)
            gradients.compressed_flat.copy_(outgoing if finite else torch.full_like(outgoing, torch.nan))
        with stats.phase("exchange"):
            [momentum], anywhere = all_reduce_mean(self.topology, gradients.flat, present, memory.coming_momentum)
        with stats.phase("decompress"):
            if torch.isfinite(gradients.flat.sum()):
                hand_back(self.optimizer, gradients.compressed, gradients.layout.views(momentum), anywhere)
                memory.clear()
            gradients.assign(anywhere, grad_scale)
        stats.bytes_sent = stats.bytes_received = dense_traffic(
            4 * (gradients.flat.numel() + momentum.numel()), self.topology.world
        )

    def momentum_buffers(self) -> dict[nn.Parameter, torch.Tensor]:
        """Parameter -> mean over ranks of the momentum that is kept here instead of in the optimizer. Collective."""
        memory, gradients = self.memory, self.gradients
        if memory.empty:
            return {}
        momentum = memory.u.clone()
        if self.topology.world > 1:
            dist.all_reduce(momentum, group=self.topology.group)
        views = gradients.layout.views(momentum / self.topology.world)
        named = zip(gradients.layout.names, gradients.compressed, views, strict=True)
        return {parameter: view.clone() for name, parameter, view in named if name in memory.started}

    def state_dict(self) -> State:
        """Kind -> parameter name -> tensor, frozen parameters included."""
        return {key: {**self._parked.get(key, {}), **parts} for key, parts in self.memory.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Replace everything that is remembered."""
        self.memory.load_state_dict(state)
        here = self.gradients.layout.names
        self._parked = {key: {n: t for n, t in parts.items() if n not in here} for key, parts in state.items()}
