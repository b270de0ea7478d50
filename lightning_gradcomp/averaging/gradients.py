"""The gradients of a model's trainable parameters in two flat fp32 buffers: compressed and dense."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from lightning_gradcomp.averaging.fsdp.shards import Shards
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.replicas import replicated
from lightning_gradcomp.averaging.trainable import check_same_parameters, check_trainable, has_stepped, parameters_of
from lightning_gradcomp.compressors import Compressor, LossyCompressor
from lightning_gradcomp.compressors.decoded import Decoded, Dense, by_tensor, locate
from lightning_gradcomp.compressors.error_feedback import ErrorFeedback
from lightning_gradcomp.compressors.layout import Layout, plain_name
from lightning_gradcomp.errors import refusal

LARGEST = 1e16
"""Largest element of an update direction in `p.grad`; in fp16, 4094. A norm then fits, too."""


@dataclass(eq=False)
class Layouts:
    """The layouts of a rank's compressed and dense gradients, which determine the bytes of a step."""

    layout: Layout
    dense_layout: Layout
    device: torch.device

    @property
    def names(self) -> tuple[str, ...]:
        return self.layout.names + self.dense_layout.names

    @property
    def n(self) -> int:
        return self.layout.n + self.dense_layout.n

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients in fp32."""
        return 4 * self.n


class Gradients(Layouts):
    """The split into compressed and dense parameters, and flat buffers for their gradients.

    Each step fills the buffers and writes them back. Names are those of `model.named_parameters()` without the prefixes
    of torch.compile and activation checkpointing.

    Args:
        model: the bare module. Parameters in its `_ddp_params_and_buffers_to_ignore` are skipped.
        compressor: chooses what to compress, by the shapes of whole tensors.
        shards: this rank's shards, for a sharded model. Only `chosen` and `left_dense` then describe whole tensors.
        optimizers: parameters that none of them has are skipped. Without any, all parameters are averaged. If they have
            none of the model's parameters, all are averaged too, and error feedback, which needs to know what a step
            uses, compresses none.
    """

    def __init__(
        self,
        model: nn.Module,
        compressor: Compressor,
        shards: Shards | None = None,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        check_trainable(model)
        self._stepped = stepped = _ids(optimizers)
        self.are_unknown = bool(optimizers) and not has_stepped(model, optimizers)
        """True if there are optimizers, but they have none of the model's parameters."""
        candidates = [(plain_name(name), p) for name, p in replicated(model)]
        mine = {name for name, p in candidates if stepped is None or self.are_unknown or id(p) in stepped}
        self.averaged = [p for name, p in candidates if name in mine]
        """The model's parameters that are averaged when they train."""
        self._others = [p for name, p in candidates if name not in mine]
        every = shards.named if shards else [(plain_name(name), p) for name, p in model.named_parameters()]
        self._every = [(name, p) for name, p in every if name in mine]
        self._all_names = {name for name, _ in every}
        self._trainable = self._trainable_now()
        named = [(name, p) for (name, p), trains in zip(self._every, self._trainable, strict=True) if trains]
        shapes = shards.whole_shapes if shards else {name: tuple(p.shape) for name, p in every}
        compressor.check_names(shapes)
        names = compressor.choose(shapes)
        if self.are_unknown and isinstance(compressor, LossyCompressor):
            names = set()
        if shards and isinstance(compressor, LossyCompressor):
            check_shards(compressor, names & mine & shards.trainable, shards.shapes_on(shards.number - 1))
        self.chosen = {name: shape for name, shape in shapes.items() if name in names}
        """Shape of every parameter of the model that is compressed when it is averaged."""
        self.left_dense = {name: shape for name, shape in shapes.items() if name not in names}
        """Shape of every other parameter."""
        taken = [(name, p) for name, p in named if name in names]
        left = [(name, p) for name, p in named if name not in names]
        device = named[0][1].device if named else torch.device("cpu")
        super().__init__(Layout.of(taken), Layout.of(left), device)
        self.compressed: list[nn.Parameter] = [p for _, p in taken]
        self.dense: list[nn.Parameter] = [p for _, p in left]
        self.sharded = shards is not None
        """True if the parameters are this rank's shards."""
        self.scale = 1.0
        """The loss scale in this step's `p.grad`."""
        self.exponents = [0] * len(taken)
        """For each of `compressed`, k: the latest update direction is 2^k · `p.grad`. 0 if that does not overflow."""
        self.compressed_flat = torch.zeros(self.layout.n, dtype=torch.float32, device=self.device)
        """A buffer for the gradients of `compressed`, fp32 [n]. A commit may swap it for another."""
        self.dense_flat = torch.zeros(self.dense_layout.n, dtype=torch.float32, device=self.device)
        """The same for `dense`."""
        self._mean_buffer = torch.empty(0, dtype=torch.float32)
        self.largest = Layouts(self.layout, self.dense_layout, self.device)
        """The largest shard's layouts; all ranks base decisions on it."""
        if shards:
            trainable = shards.trainable & mine
            first = {name: shape for name, shape in shards.shapes_on(0).items() if name in trainable}
            taken, left = ({n: s for n, s in first.items() if (n in names) is chosen} for chosen in (True, False))
            self.largest = Layouts(
                Layout(tuple(taken), tuple(taken.values())), Layout(tuple(left), tuple(left.values())), self.device
            )

    def _trainable_now(self) -> list[bool]:
        return [parameter.requires_grad for _, parameter in self._every]

    def check_same(self, ranks: Ranks) -> None:
        check_same_parameters(self._every, self._trainable, ranks, self.device)

    @property
    def flats(self) -> list[torch.Tensor]:
        return [self.compressed_flat, self.dense_flat]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in zip(self.names, self.parameters, strict=True)}

    @property
    def left_out(self) -> set[str]:
        """Names of the model's other parameters: frozen, or not the optimizers'."""
        return self._all_names - set(self.names)

    @property
    def trains_others(self) -> bool:
        """True if a parameter that requires a gradient is not averaged."""
        return any(p.requires_grad for p in self._others)

    @property
    def is_stale(self) -> bool:
        """True if a parameter was frozen or unfrozen since the gradients were laid out."""
        return self._trainable_now() != self._trainable

    def fits(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """True if the gradients are laid out for the parameters of `optimizers` that train now."""
        return not self.is_stale and _ids(optimizers) == self._stepped

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self.compressed + self.dense

    def local(self) -> dict[str, torch.Tensor]:
        """Name -> fp32 copy of `p.grad` if there is one."""
        return {name: p.grad.detach().float().clone() for name, p in self._every if p.grad is not None}

    def put_back(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Restore what `local` returned."""
        for name, parameter in self._every:
            if name in gradients:
                parameter.grad = gradients[name].to(parameter)

    @property
    def present(self) -> list[bool]:
        return [parameter.grad is not None for parameter in self.parameters]

    def marked(self, marks: list[bool]) -> frozenset[str]:
        return frozenset(name for name, mark in zip(self.names, marks, strict=True) if mark)

    def collect(self, *, unscale: bool = True) -> None:
        """Fill the buffers with `p.grad`, or 0 without one. With `unscale`, divide by the loss scale.

        A `p.grad` with a graph, after `backward(create_graph=True)`, becomes a copy without one.
        """
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.requires_grad:
                parameter.grad = parameter.grad.detach().clone()
        views = [*self.layout.views(self.compressed_flat), *self.dense_layout.views(self.dense_flat)]
        grads = [(view, p.grad) for view, p in zip(views, self.parameters, strict=True) if p.grad is not None]
        if len(grads) < len(views):
            for flat in self.flats:
                flat.zero_()
        if grads:
            torch._foreach_copy_([view for view, _ in grads], [grad for _, grad in grads])
        if unscale and self.scale != 1:
            for flat in self.flats:
                flat.div_(self.scale)

    def mean_buffer(self) -> torch.Tensor:
        """Fp32 [n], reused for a mean that is not sparse, which is faster than a new one per step."""
        if self._mean_buffer.numel() != self.layout.n:
            self._mean_buffer = torch.empty_like(self.compressed_flat)
        return self._mean_buffer

    def assign(
        self,
        compressed: Decoded,
        dense: torch.Tensor,
        present: list[bool],
        factors: Sequence[float],
        dense_factor: float,
    ) -> None:
        """Write averages, times their factors, into `p.grad` of the parameters that are `present` on any rank.

        `dense` is fp32 [d]. Each compressed parameter has a factor of its own; all dense ones share `dense_factor`.
        """
        views, factors = self.dense_layout.views(dense), [*factors, *[dense_factor] * len(self.dense)]
        if isinstance(compressed, Dense):
            views = self.layout.views(compressed.values) + views
        else:
            parts = zip(self.compressed, present, by_tensor(compressed, self.layout), factors, strict=False)
            for parameter, wanted, part, factor in parts:
                if wanted:
                    _write_at(parameter, *part, factor)
        first = len(self.parameters) - len(views)
        _write(views, self.parameters[first:], present[first:], factors[first:])

    def assign_updates(
        self, compressed: Decoded, dense: torch.Tensor, present: list[bool], state: ErrorFeedback
    ) -> None:
        """Write what was averaged in a step with error feedback, times the loss scale, as `assign` does.

        A step of Adam is divided by the learning rate. If the result would overflow `p.grad`, it is written times 2^-k:
        fp16 ends at 65504, and steps from before a fall of the learning rate are long compared with it.
        """
        rates = state.learning_rates() or [1.0] * len(self.compressed)
        self.exponents = [0] * len(self.compressed)
        if state.owns_momentum:
            self.exponents = self._exponents(compressed, rates)
        scaled = zip(self.exponents, rates, strict=True)
        factors = [math.ldexp(self.scale, -k) / rate if rate else 0.0 for k, rate in scaled]
        self.assign(compressed, dense, present, factors, self.scale)

    def _exponents(self, compressed: Decoded, rates: Sequence[float]) -> list[int]:
        """Finds the largest element only where an overflow is possible."""
        limits = [min(LARGEST, torch.finfo(p.dtype).max / 16) for p in self.compressed]
        narrow = [rate and (limit < LARGEST or rate < 1e-15) for limit, rate in zip(limits, rates, strict=True)]
        if not any(narrow):
            return [0] * len(rates)
        parts = [values for _, values in by_tensor(compressed, self.layout)]
        largest = torch.stack(
            [v.abs().max() if n and len(v) else v.new_zeros(()) for v, n in zip(parts, narrow, strict=True)]
        )
        return [
            max(0, math.ceil(math.log2(most) + math.log2(self.scale) - math.log2(rate) - math.log2(limit)))
            if most
            else 0
            for most, rate, limit in zip(largest.tolist(), rates, limits, strict=True)
        ]

    def fill(self, value: float, present: list[bool]) -> None:
        for parameter, wanted in zip(self.parameters, present, strict=True):
            if wanted:
                parameter.grad = torch.full_like(parameter, value)

    def values(self, compressed: Decoded, dense: torch.Tensor, name: str) -> torch.Tensor:
        """A parameter's part of the averages that `assign` takes: 1-D, some or all elements."""
        if name in self.dense_layout.names:
            start, stop = self.dense_layout.bounds[self.dense_layout.names.index(name)]
            return dense[start:stop]
        return list(by_tensor(compressed, self.layout))[self.layout.names.index(name)][1]


def _ids(optimizers: Sequence[torch.optim.Optimizer]) -> frozenset[int] | None:
    """ids of the optimizers' parameters; None without an optimizer."""
    if not optimizers:
        return None
    return frozenset(id(p) for p in parameters_of(*optimizers))


def check_shards(compressor: Compressor, names: Set[str], smallest: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError if a replica's last rank has nothing to compress, or shards that `compressor` can't compress.

    `names` are those of the compressed tensors; `smallest` has the shape of each shard on the last rank.
    """
    taken = {name: shape for name, shape in smallest.items() if name in names}
    if taken and not any(prod(shape) for shape in taken.values()):
        allowed = "a mesh with fewer ranks in a replica, or larger tensors: each rank needs a part of some tensor"
        raise refusal("shards of the tensors that are compressed", "a rank whose shards are all empty", allowed)
    compressor.check_shards(taken)


# Lists of tensors are copied in one call. On a GPU this is one launch if they are contiguous and share a dtype.


@torch.no_grad()
def _write(
    parts: list[torch.Tensor], parameters: list[nn.Parameter], wanted: list[bool], factors: Sequence[float]
) -> None:
    """Write each of `parts` (fp32), times its factor, into the parameter's `p.grad` if it is `wanted`."""
    copied, factors_of_copied = [], []
    for parameter, view, wants, factor in zip(parameters, parts, wanted, factors, strict=True):
        if not wants:
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        same = parameter.grad.dtype == view.dtype
        if factor == 1 or (same and view.is_cuda):
            copied.append((parameter.grad, view))
            factors_of_copied.append(factor)
        elif same:
            torch.mul(view, factor, out=parameter.grad)
        else:
            parameter.grad.copy_(view * factor)
    if copied:
        grads, views = zip(*copied, strict=True)
        torch._foreach_copy_(grads, views)
        if any(factor != 1 for factor in factors_of_copied):
            torch._foreach_mul_(grads, factors_of_copied)


@torch.no_grad()
def _write_at(parameter: nn.Parameter, places: torch.Tensor | None, values: torch.Tensor, factor: float) -> None:
    """Write `values` times `factor` into the gradient at `places`, and 0 elsewhere; without places, everywhere."""
    if factor != 1:
        values = values * factor
    if places is None:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(values.view(parameter.shape))
        return
    # Copying a flat average that is 0 nearly everywhere would cost more than everything else.
    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
    view, index = locate(places, grad)
    view[index] = values.to(grad.dtype)
    parameter.grad = grad
