"""How a server handles pushes and pulls, without networking.

A server holds a partition of the weights and steps it with torch's own optimizer at each push. A method with momentum
correction (DGC) sends a velocity, which is applied with the learning rate alone. A pull carries all weights of the
partition. They may travel rounded, because the server keeps them in fp32.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lightning_gradcomp.compressors.base import Codec, Compressor, LossyCompressor
from lightning_gradcomp.compressors.blocks import FORMATS, FewBitPayloads
from lightning_gradcomp.compressors.decoded import Decoded, by_tensor, locate
from lightning_gradcomp.compressors.kernels.formats import pack_values, unpack_values, value_bytes
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.payloads import Payloads, Uncompressed, slice_bytes
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.parameter_server.messages import SKIP, Request

PULLS = ("fp32", "bf16", "int8")
"""Formats of the weights in a pull."""


@dataclass(frozen=True)
class Pull:
    """The weights that a worker receives: bytes (uint8), and the version and fingerprint of the weights."""

    body: torch.Tensor
    version: int
    fingerprint: int


@dataclass(frozen=True)
class Part:
    """The parameters of one server, compressed and uncompressed: where each begin in the buffer of all servers."""

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

    def push_bytes(self, compressor: Compressor, codec: Payloads) -> tuple[int, int, int]:
        """Bytes of a push: of its uncompressed gradients, its payload, and its flags, one per parameter."""
        dense = value_bytes(self.dense_layout.n, dense_format(compressor))
        return dense, slice_bytes(codec, self.layout), len(self.names)

    @cached_property
    def pull_layouts(self) -> tuple[Layout, Layout]:
        """Layouts of a pull: biases, norms and numbers, which travel in fp32, and all other weights."""
        shapes = dict(zip(self.names, self.layout.shapes + self.dense_layout.shapes, strict=True))
        few = {name: shape for name, shape in shapes.items() if len(shape) < 2}
        rest = {name: shape for name, shape in shapes.items() if len(shape) > 1}
        return Layout(tuple(few), tuple(few.values())), Layout(tuple(rest), tuple(rest.values()))


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
    if isinstance(compressor, LossyCompressor):
        final = compressor.with_sparsity(compressor.final_sparsity)
        if isinstance(final, Codec):
            return final.for_step(worker, step)
    elif compressor.wire in FORMATS:
        return FewBitPayloads(FORMATS[compressor.wire], (worker, step))
    else:
        return Uncompressed(compressor.wire)
    allowed = "a compressor whose payloads a server can decode: DGC, GradientDropping, OneBit, TwoBit, EDEN or 'int8'"
    raise refusal("compressor with dist_async", type(compressor).__name__, allowed)


def dense_format(compressor: Compressor) -> str:
    """Format of the uncompressed gradients in a push."""
    if isinstance(compressor, LossyCompressor):
        return compressor.dense_values
    return "fp32" if compressor.wire in FORMATS else compressor.wire


def check_pull(values: str) -> None:
    """Raises ValueError unless pulls can travel in this format."""
    if values not in PULLS:
        raise refusal("pull", values, "'fp32', 'bf16' or 'int8', the format of the weights")


def _in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in fp32, or in fp64 if it is: small steps would round to nothing in 16 bits."""
    wider = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    return tensor.to(wider, copy=True)


class ServerPartition:
    """A partition of the weights, and the optimizer that steps it. Thread-safe: one push or pull at a time.

    `parameters` are the whole model's; those of the partition are copied.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        part: Part,
        optimizer: torch.optim.Optimizer,
        compressor: Compressor,
        *,
        pull: str = "fp32",
    ) -> None:
        self.part, self.compressor, self._pull_format = part, compressor, pull
        self.weights = {name: nn.Parameter(_in_fp32(parameters[name].detach().cpu())) for name in part.names}
        self._groups: list[int] = []
        self.optimizer = self._optimizer(parameters, optimizer)
        self._owns_momentum = compressor.state_for(optimizer).owns_momentum
        self.version = 0
        """Pushes so far, including skips."""
        self._latest: dict[int, int] = {}
        """Live worker -> clock of its latest push. A worker's pushes are consecutive, so partitions with equal entries
        have applied the same pushes."""
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

    def push(self, request: Request, dense: torch.Tensor, payload: torch.Tensor, present: torch.Tensor) -> None:
        """Apply a push. A skip is counted only; its tensors are empty.

        `dense` are the uncompressed gradients, packed, and `payload` the compressed ones, both uint8. `present`, uint8,
        is 1 for each of the partition's parameters whose gradient the push has. The optimizer skips the others.
        """
        with self._lock:
            self.version += 1
            self._latest[request.worker] = request.clock
            if request.kind != SKIP and self.optimizer is not None:
                self._apply(request, dense, payload, present)

    @torch.no_grad()
    def _apply(self, request: Request, dense: torch.Tensor, payload: torch.Tensor, present: torch.Tensor) -> None:
        part, codec = self.part, codec_of(self.compressor, request.worker, request.clock)
        for group, number in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["lr"] = request.rates[number]
        self._set_gradients(part.dense_layout, unpack_values(dense, part.dense_layout.n, dense_format(self.compressor)))
        if part.layout.n:
            decoded = codec.unpack(payload, part.layout)
            if self._owns_momentum:
                self._descend(decoded)
            else:
                flat = torch.zeros(part.layout.n, dtype=torch.float32)
                decoded.add_to(flat)
                self._set_gradients(part.layout, flat)
        for name, has_gradient in zip(part.names, present.tolist(), strict=True):
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

    def pull(self, *, whole: bool) -> Pull:
        """All weights: `whole` in fp32, else in the format of pulls."""
        with self._lock:
            few, rest = (self._flat(layout) for layout in self.part.pull_layouts)
            exact = whole or self._pull_format == "fp32"
            packed = rest.view(torch.uint8) if exact else pack_values(rest, self._pull_format)
            body = torch.cat([few.view(torch.uint8), packed])
            return Pull(body, self.version, hash(frozenset(self._latest.items())) % 2**62)

    def forget(self, worker: int) -> None:
        """Forget the clock of a worker that has left."""
        with self._lock:
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
        if self.optimizer is None:
            return
        with self._lock:
            for name, weight in self.weights.items():
                self.optimizer.state.pop(weight, None)
                if name in state:
                    self.optimizer.state[weight] = {
                        kind: _in_fp32(v.to(weight.device)) if isinstance(v, torch.Tensor) else deepcopy(v)
                        for kind, v in state[name].items()
                    }

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights."""
        with self._lock:
            for name, parameter in self.weights.items():
                parameter.copy_(weights[name])
