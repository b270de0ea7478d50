"""How a server handles pushes and pulls, without networking.

A server holds a partition of the weights and steps it with torch's own optimizer at each push. A method with momentum
correction (DGC) sends a velocity, which is applied with the learning rate alone. A pull carries the weights, or their
change since the worker's last pull, compressed with error feedback: the server tracks each worker's weights and
compresses the difference.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_gradcomp.compressors.base import Codec, Compressor, LossyCompressor
from lightning_gradcomp.compressors.decoded import Decoded, by_tensor, locate
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.payloads import Payloads, Uncompressed, slice_bytes
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.parameter_server.messages import SKIP, Request


@dataclass(frozen=True)
class Pull:
    """The weights that a worker receives: bytes (uint8), and the version and fingerprint of the weights."""

    body: torch.Tensor
    version: int
    fingerprint: int


@dataclass(frozen=True)
class Part:
    """The parameters of one server, compressed and uncompressed.

    Args:
        start, layout: those of the compressed ones, in the buffer of all servers.
        dense_start, dense_layout: likewise for the uncompressed ones.
    """

    start: int
    layout: Layout
    dense_start: int
    dense_layout: Layout

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters."""
        return self.layout.names + self.dense_layout.names

    def of(self, flat: torch.Tensor, dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of this part of both buffers."""
        return (
            flat[self.start : self.start + self.layout.n],
            dense[self.dense_start : self.dense_start + self.dense_layout.n],
        )

    def body_bytes(self, codec: Payloads) -> int:
        """Bytes of the uncompressed parameters in fp32 plus those of the payload."""
        return 4 * self.dense_layout.n + slice_bytes(codec, self.layout)


def parts(layout: Layout, dense_layout: Layout, servers: int) -> list[Part]:
    """Divide the parameters among servers. Some servers get none if there are too few.

    Parameters without elements, which are never compressed, go to the first server.
    """
    found = []
    for each in (layout, dense_layout):
        cuts = [(partition.start, partition.layout) for partition in each.parts(servers)] if each.n else []
        found.append([*cuts, *[(each.n, Layout((), ()))] * (servers - len(cuts))])
    empty = {name: shape for name, shape in zip(dense_layout.names, dense_layout.shapes, strict=True) if 0 in shape}
    start, first = found[1][0]
    found[1][0] = start, Layout(first.names + tuple(empty), first.shapes + tuple(empty.values()))
    return [Part(*one, *other) for one, other in zip(*found, strict=True)]


def codec_of(compressor: Compressor, worker: int, step: int) -> Payloads:
    """The codec of the payloads of a worker's step.

    Raises ValueError if the payloads can't be decoded without those of other workers.
    """
    if not isinstance(compressor, LossyCompressor):
        return Uncompressed(compressor.wire)
    final = compressor.with_sparsity(compressor.final_sparsity)
    if isinstance(final, Codec):
        return final.for_step(worker, step)
    allowed = (
        "DGC, GradientDropping, OneBit, TwoBit, 'none', 'fp16', 'bf16' or 'int8', whose payloads a server can decode"
    )
    raise refusal("compressor with dist_async", type(compressor).__name__, allowed)


class ServerPartition:
    """A partition of the weights, and the optimizer that steps it. Thread-safe: one push or pull at a time.

    Args:
        parameters: name -> parameter, for the whole model; those of the partition are copied.
        part: the partition.
        optimizer: its class, groups and options are used.
        compressor: compressor of the pushes.
        max_staleness: drop a push whose weights are more than this many versions old; its worker keeps the update.
            None: never drop a push.
        rate_by_staleness: divide the learning rate of a push by its staleness if that is above 1 (Zhang et al., IJCAI
            2016, "Staleness-aware async-SGD").
        pull: compressor of the pulls.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        part: Part,
        optimizer: torch.optim.Optimizer,
        compressor: Compressor,
        *,
        max_staleness: int | None = None,
        rate_by_staleness: bool = False,
        pull: Compressor | None = None,
    ) -> None:
        self.part, self.compressor, self.pull_compressor = part, compressor, pull
        self.max_staleness, self.rate_by_staleness = max_staleness, rate_by_staleness
        self.weights = {name: nn.Parameter(parameters[name].detach().cpu().clone()) for name in part.names}
        self._groups: list[int] = []
        self.optimizer = self._optimizer(parameters, optimizer)
        self._owns_momentum = compressor.state_for(optimizer).owns_momentum
        self.version = 0
        """Pushes so far, including dropped ones and skips."""
        self._latest: dict[int, int] = {}
        """Live worker -> clock of its latest push. A worker's pushes are consecutive, so partitions with equal entries
        have applied the same pushes."""
        self._views: dict[int, torch.Tensor] = {}
        """Worker -> its weights for the compressed parameters, if pulls are compressed."""
        self._lock = threading.Lock()

    def _optimizer(self, parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> Any:
        """An optimizer of the same class, with the groups that contain a parameter of this partition."""
        by_id = {id(parameter): name for name, parameter in parameters.items()}
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            mine = [self.weights[name] for p in group["params"] if (name := by_id.get(id(p))) in self.weights]
            if mine:
                groups.append({**deepcopy({k: v for k, v in group.items() if k != "params"}), "params": mine})
                self._groups.append(number)
        cls: Any = type(optimizer)
        return cls(groups, lr=optimizer.param_groups[0]["lr"]) if groups else None

    # Pushes

    def push(self, request: Request, body: torch.Tensor, present: torch.Tensor | None = None) -> bool:
        """Apply a push, or drop it.

        Args:
            request: its header.
            body: the uncompressed gradients in fp32, then the payload: uint8.
            present: uint8, for each of the partition's parameters 1 if the push has its gradient. The optimizer skips
                the others. None: it has all.

        Returns:
            True if it was applied. Otherwise the worker keeps the update.
        """
        with self._lock:
            staleness = self.version - request.version
            self.version += 1
            self._latest[request.worker] = request.clock
            if request.kind == SKIP or (self.max_staleness is not None and staleness > self.max_staleness):
                return False
            if self.optimizer is not None:
                self._apply(request, body, present, max(1, staleness) if self.rate_by_staleness else 1)
            return True

    @torch.no_grad()
    def _apply(self, request: Request, body: torch.Tensor, present: torch.Tensor | None, divisor: int) -> None:
        part, codec = self.part, codec_of(self.compressor, request.worker, request.clock)
        for group, number in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["lr"] = request.rates[number] / divisor
        end = 4 * part.dense_layout.n
        self._set_gradients(part.dense_layout, body[:end].view(torch.float32))
        if part.layout.n:
            decoded = codec.unpack(body[end:], part.layout)
            if self._owns_momentum:
                self._descend(decoded)
            else:
                flat = torch.zeros(part.layout.n, dtype=torch.float32)
                decoded.add_to(flat)
                self._set_gradients(part.layout, flat)
        for name, has_gradient in zip(part.names, [] if present is None else present.tolist(), strict=False):
            if not has_gradient:
                self.weights[name].grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _set_gradients(self, layout: Layout, flat: torch.Tensor) -> None:
        for name, view in zip(layout.names, layout.views(flat), strict=True):
            self.weights[name].grad = view.to(self.weights[name].dtype)

    def _descend(self, velocity: Decoded) -> None:
        """Subtract learning rate · velocity from the weights."""
        rates = {id(p): group["lr"] for group in self.optimizer.param_groups for p in group["params"]}
        for name, (places, values) in zip(self.part.layout.names, by_tensor(velocity, self.part.layout), strict=True):
            weight = self.weights[name]
            if places is None:
                weight.sub_(values.view(weight.shape), alpha=rates[id(weight)])
            else:
                view, index = locate(places, weight)
                view[index] -= rates[id(weight)] * values

    # Pulls

    def pull(self, worker: int, whole: bool) -> Pull:
        """The weights for a worker.

        Args:
            worker: its number.
            whole: True: all weights in fp32, as is always the case without a pull compressor. False: the uncompressed
                parameters, and the compressed change of the others.
        """
        with self._lock:
            return Pull(self._body(worker, whole), self.version, hash(frozenset(self._latest.items())) % 2**62)

    def _body(self, worker: int, whole: bool) -> torch.Tensor:
        flat, dense = (self._flat(layout) for layout in (self.part.layout, self.part.dense_layout))
        if self.pull_compressor is None or whole or worker not in self._views:
            if self.pull_compressor is not None:
                self._views[worker] = flat
            return torch.cat([dense, flat]).view(torch.uint8)
        if not self.part.layout.n:
            return dense.view(torch.uint8)
        view = self._views[worker]
        payload, sent = codec_of(self.pull_compressor, worker, self.version).pack(flat - view, self.part.layout)
        sent.add_to(view)
        return torch.cat([dense.view(torch.uint8), payload])

    def forget(self, worker: int) -> None:
        """Remove the state of a worker that has left."""
        with self._lock:
            self._views.pop(worker, None)
            self._latest.pop(worker, None)

    def _flat(self, layout: Layout) -> torch.Tensor:
        values = [self.weights[name].detach().reshape(-1).float() for name in layout.names]
        return torch.cat([torch.zeros(0, dtype=torch.float32), *values])

    # Checkpoints

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Parameter name -> a copy of its weights, all after the same pushes."""
        with self._lock:
            return {name: p.detach().clone() for name, p in self.weights.items()}

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Parameter name -> torch's name -> value of the optimizer's state."""
        with self._lock:
            state = {} if self.optimizer is None else self.optimizer.state
            return {name: deepcopy(state[p]) for name, p in self.weights.items() if p in state}

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the optimizer's state with one from `optimizer_state`, on any device."""
        with self._lock:
            for name, weight in self.weights.items():
                self.optimizer.state.pop(weight, None)
                if name in state:
                    values = deepcopy(dict(state[name]))
                    moved = {k: v.to(weight.device) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
                    self.optimizer.state[weight] = moved

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights. Every worker's next pull is whole."""
        with self._lock:
            self._views.clear()
            for name, parameter in self.weights.items():
                parameter.copy_(weights[name])
