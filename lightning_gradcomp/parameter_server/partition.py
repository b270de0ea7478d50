"""What a server does with a push: the rules, without a network.

A server holds a partition of the weights. It applies torch's own optimizer to it at each push; what a method with
momentum correction sends (DGC) is a velocity, which lacks nothing but the learning rate. Pulls are the weights, or what
changed since the worker's last pull, compressed, with error feedback: the server keeps what each worker has, and
sends part of the difference.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.compressors.base import Codec, Compressor, LossyCompressor
from lightning_gradcomp.compressors.decoded import Decoded, by_tensor, locate
from lightning_gradcomp.compressors.kernels.formats import DTYPES
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.payloads import Payloads, Uncompressed
from lightning_gradcomp.errors import refusal


@dataclass(frozen=True)
class Push:
    """What a worker says of a push.

    Args:
        worker: who pushes.
        clock: its steps so far.
        version: of the partition, when the worker pulled the weights that the gradient is of.
        rates: learning rate of each of the optimizer's groups.
        skip: nothing to apply: the worker's gradient was not finite.
        present: which of the partition's parameters it is of. The optimizer skips the others. None: of all.
    """

    worker: int
    clock: int
    version: int
    rates: tuple[float, ...]
    skip: bool = False
    present: tuple[bool, ...] | None = None


@dataclass(frozen=True)
class Pull:
    """What a worker gets: bytes (uint8), and the version and fingerprint of the weights that they are of."""

    body: torch.Tensor
    version: int
    fingerprint: int


@dataclass(frozen=True)
class Part:
    """The parameters of one server: those that are compressed, and the others.

    Args:
        start: of the compressed ones, in the buffer of all.
        layout: of them.
        dense_start, dense_layout: the same of the others.
    """

    start: int
    layout: Layout
    dense_start: int
    dense_layout: Layout

    @property
    def names(self) -> tuple[str, ...]:
        """Of all its parameters."""
        return self.layout.names + self.dense_layout.names

    def of(self, flat: torch.Tensor, dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This part of both buffers."""
        return (
            flat[self.start : self.start + self.layout.n],
            dense[self.dense_start : self.dense_start + self.dense_layout.n],
        )

    def body_bytes(self, codec: Payloads) -> int:
        """Bytes of uncompressed parameters in fp32, and of a payload."""
        return 4 * self.dense_layout.n + (codec.payload_bytes(self.layout) if self.layout.n else 0)


def parts(layout: Layout, dense_layout: Layout, servers: int) -> list[Part]:
    """What each of `servers` holds, cut between parameters; a server has nothing where there are too few.

    Parameters without elements, which are never compressed, are the first server's.
    """
    found = []
    for each in (layout, dense_layout):
        cuts = [(partition.start, partition.layout) for partition in each.parts(servers)] if each.n else []
        found.append([*cuts, *[(each.n, Layout((), ()))] * (servers - len(cuts))])
    empty = {name: shape for name, shape in zip(dense_layout.names, dense_layout.shapes, strict=True) if 0 in shape}
    start, first = found[1][0]
    found[1][0] = start, Layout(first.names + tuple(empty), first.shapes + tuple(empty.values()))
    return [Part(*one, *other) for one, other in zip(*found, strict=True)]


def agreed(
    gradients: Gradients,
    optimizer: torch.optim.Optimizer,
    compressor: Compressor,
    pull: Compressor | None,
    job: str,
) -> tuple[object, ...]:
    """What a worker and its servers must have alike."""
    return gradients.layout, gradients.dense_layout, len(optimizer.param_groups), compressor, pull, job


def codec_of(compressor: Compressor, worker: int, step: int) -> Payloads:
    """What writes and reads the payloads of a worker's step.

    Raises:
        ValueError: a compressor whose payloads can't be read without the other workers.
    """
    if not isinstance(compressor, LossyCompressor):
        return Uncompressed(next(values for values, dtype in DTYPES.items() if dtype == compressor.wire_dtype))
    final = compressor.with_sparsity(compressor.final_sparsity)
    if isinstance(final, Codec):
        return final.for_step(worker, step)
    name, allowed = type(compressor).__name__, "one whose payloads a server reads by themselves: DGC, GradientDropping,"
    raise refusal("compressor with dist_async", name, f"{allowed} OneBit, TwoBit, or 'none', 'fp16', 'bf16'")


class ServerPartition:
    """A partition of the weights, and the optimizer that acts on it. Safe for threads: one push or pull at a time.

    Args:
        parameters: name -> parameter, of the whole model; those of the partition are copied.
        part: which they are.
        optimizer: whose class, groups and options are used.
        compressor: of the pushes.
        max_staleness: a push of weights that are more than so many versions old is dropped; the worker keeps it. None:
            none is.
        rate_by_staleness: divide the learning rate by a push's staleness, where that is above 1 (Zhang et al., IJCAI
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
        """Pushes so far, dropped ones and skips included."""
        self._latest: dict[int, int] = {}
        """Worker that is there -> clock of its latest push. Partitions with the same ones have the same pushes of these
        workers, as a worker's pushes are consecutive."""
        self._views: dict[int, torch.Tensor] = {}
        """What each worker has of the compressed parameters, where pulls are compressed."""
        self._lock = threading.Lock()

    def _optimizer(self, parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> Any:
        """One of the same class, with the groups that have a parameter of this partition."""
        by_id = {id(parameter): name for name, parameter in parameters.items()}
        groups, self._groups = [], []
        for number, group in enumerate(optimizer.param_groups):
            mine = [self.weights[name] for p in group["params"] if (name := by_id.get(id(p))) in self.weights]
            if mine:
                groups.append({**deepcopy({k: v for k, v in group.items() if k != "params"}), "params": mine})
                self._groups.append(number)
        cls: Any = type(optimizer)
        return cls(groups, lr=optimizer.param_groups[0]["lr"]) if groups else None

    # Pushes

    def push(self, push: Push, body: torch.Tensor) -> bool:
        """Applies a push (body: uint8, the uncompressed gradients in fp32 and the payload), or drops it.

        Returns:
            Whether it counts. If not, the worker keeps what it has sent.
        """
        with self._lock:
            staleness = self.version - push.version
            self.version += 1
            self._latest[push.worker] = push.clock
            if push.skip or (self.max_staleness is not None and staleness > self.max_staleness):
                return False
            if self.optimizer is not None:
                self._apply(push, body, max(1, staleness) if self.rate_by_staleness else 1)
            return True

    @torch.no_grad()
    def _apply(self, push: Push, body: torch.Tensor, divisor: int) -> None:
        part, codec = self.part, codec_of(self.compressor, push.worker, push.clock)
        for group, number in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["lr"] = push.rates[number] / divisor
        end = 4 * part.dense_layout.n
        dense = body[:end].view(torch.float32)
        for name, view in zip(part.dense_layout.names, part.dense_layout.views(dense), strict=True):
            self.weights[name].grad = view.to(self.weights[name].dtype)
        if part.layout.n:
            self._use(codec.unpack(body[end:], part.layout))
        for name, present in zip(part.names, push.present or (), strict=False):
            if not present:
                self.weights[name].grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _use(self, decoded: Decoded) -> None:
        """Descends along a velocity; hands a gradient to the optimizer."""
        if not self._owns_momentum:
            flat = torch.zeros(self.part.layout.n, dtype=torch.float32)
            decoded.add_to(flat)
            for name, view in zip(self.part.layout.names, self.part.layout.views(flat), strict=True):
                self.weights[name].grad = view.to(self.weights[name].dtype)
            return
        rates = {id(p): group["lr"] for group in self.optimizer.param_groups for p in group["params"]}
        for name, (places, values) in zip(self.part.layout.names, by_tensor(decoded, self.part.layout), strict=True):
            weight = self.weights[name]
            if places is None:
                weight.sub_(values.view(weight.shape), alpha=rates[id(weight)])
            else:
                view, index = locate(places, weight)
                view[index] -= rates[id(weight)] * values

    # Pulls

    def pull(self, worker: int, whole: bool) -> Pull:
        """All weights in fp32 (`whole`, or without a compressor of pulls), or the uncompressed parameters and what the
        compressor sends of the others' change."""
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
        """A worker has gone."""
        with self._lock:
            self._views.pop(worker, None)
            self._latest.pop(worker, None)

    def _flat(self, layout: Layout) -> torch.Tensor:
        return torch.cat(
            [
                torch.zeros(0, dtype=torch.float32),
                *(self.weights[name].detach().reshape(-1).float() for name in layout.names),
            ]
        )

    # Checkpoints

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Parameter name -> copy of the weights, all with the same pushes."""
        with self._lock:
            return {name: p.detach().clone() for name, p in self.weights.items()}

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Parameter name -> torch's name -> value, of the optimizer's state."""
        with self._lock:
            state = {} if self.optimizer is None else self.optimizer.state
            return {name: deepcopy(state[p]) for name, p in self.weights.items() if p in state}

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace it."""
        with self._lock:
            for name, weight in self.weights.items():
                self.optimizer.state.pop(weight, None)
                if name in state:  # on a GPU, where the model is
                    values = deepcopy(dict(state[name]))
                    moved = {k: v.to(weight.device) if isinstance(v, torch.Tensor) else v for k, v in values.items()}
                    self.optimizer.state[weight] = moved

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights; every worker's next pull is whole."""
        with self._lock:
            self._views.clear()
            for name, parameter in self.weights.items():
                parameter.copy_(weights[name])
