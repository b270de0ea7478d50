"""The gradients of a model's trainable parameters as flat fp32 buffers: the compressed ones and the dense ones."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from lightning_gradcomp.averaging.fsdp.shards import Shards
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.replicas import ignored_by_ddp
from lightning_gradcomp.averaging.same_parameters import check_same_parameters
from lightning_gradcomp.averaging.trainable import check_trainable
from lightning_gradcomp.compressors import Compressor
from lightning_gradcomp.compressors.decoded import Decoded, Dense, by_tensor, locate
from lightning_gradcomp.compressors.layout import Layout, plain_name
from lightning_gradcomp.compressors.local_gradient import LocalGradient
from lightning_gradcomp.errors import refusal


@dataclass(frozen=True)
class Layouts:
    """How a rank's gradients are laid out, without the gradients: what the bytes of a step follow from."""

    layout: Layout
    dense_layout: Layout
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients in fp32."""
        return 4 * (self.layout.n + self.dense_layout.n)


class Gradients:
    """Which parameters are compressed, and their gradients, collected and assigned afresh at every step.

    Names are those of `model.named_parameters()` without the prefixes of torch.compile and activation checkpointing.

    Args:
        model: the bare module. Its `_ddp_params_and_buffers_to_ignore` is honoured.
        compressor: chooses what is compressed, by the shapes of whole tensors.
        shards: of a sharded model: this rank's part of it, which all but `chosen` and `left_dense` is about.
        stepped: ids of the model's parameters that an optimizer has; others have no part in an average. None: all.

    Raises:
        ValueError: parameters whose gradients can't be laid out flat (sparse embeddings, complex numbers), or shards
            that the compressor can't work with.
    """

    def __init__(
        self,
        model: nn.Module,
        compressor: Compressor,
        shards: Shards | None = None,
        stepped: Container[int] | None = None,
    ) -> None:
        check_trainable(model)
        ignored = ignored_by_ddp(model)
        mine = {
            plain_name(name): id(p) for name, p in model.named_parameters()
            if name not in ignored and (stepped is None or id(p) in stepped)
        }  # fmt: skip
        every = shards.named if shards else [(plain_name(name), p) for name, p in model.named_parameters()]
        self._every = [(name, p) for name, p in every if name in mine]
        self._trainable = self.trainable_now()
        named = [(name, p) for (name, p), trains in zip(self._every, self._trainable, strict=True) if trains]
        shapes = shards.whole_shapes if shards else {name: tuple(p.shape) for name, p in every}
        compressor.check_names(shapes)
        shapes = {name: shape for name, shape in shapes.items() if name in mine}
        names = compressor.choose(shapes)
        if shards:
            check_shards(compressor, names & shards.trainable, shards.shapes_on(shards.number - 1))
        self.chosen = {name: shape for name, shape in shapes.items() if name in names}
        """Shape of every parameter that is compressed when it trains."""
        self.left_dense = {name: shape for name, shape in shapes.items() if name not in names}
        """Shape of every other."""
        taken = [(name, p) for name, p in named if name in names]
        left = [(name, p) for name, p in named if name not in names]
        self.layout, self.dense_layout = Layout.of(taken), Layout.of(left)
        self.compressed: list[nn.Parameter] = [p for _, p in taken]
        self.dense: list[nn.Parameter] = [p for _, p in left]
        self.sharded = shards is not None
        """Whether the parameters are this rank's shards of others."""
        self.device = named[0][1].device if named else torch.device("cpu")
        self.compressed_flat = torch.zeros(self.layout.n, dtype=torch.float32, device=self.device)
        """A buffer for the gradients of `compressed`, fp32 [n]; a step may exchange it for another."""
        self.dense_flat = torch.zeros(self.dense_layout.n, dtype=torch.float32, device=self.device)
        """The same for those of `dense`."""
        self.largest = Layouts(self.layout, self.dense_layout, self.device)
        """The layouts of the rank that has most to send: of a replica's first shard. All ranks decide by them."""
        if shards:
            trainable = shards.trainable & mine.keys()
            first = {name: shape for name, shape in shards.shapes_on(0).items() if name in trainable}
            taken, left = ({n: s for n, s in first.items() if (n in names) is chosen} for chosen in (True, False))
            self.largest = Layouts(
                Layout(tuple(taken), tuple(taken.values())), Layout(tuple(left), tuple(left.values())), self.device
            )

    def trainable_now(self) -> list[bool]:
        """Which of the model's parameters require a gradient at this moment."""
        return [parameter.requires_grad for _, parameter in self._every]

    def check_same(self, ranks: Ranks) -> None:
        """ValueError, on every rank, if the ranks train different parameters. Collective."""
        check_same_parameters(self._every, self._trainable, ranks, self.device)

    @property
    def n(self) -> int:
        """Elements of all parameters."""
        return self.layout.n + self.dense_layout.n

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients in fp32."""
        return 4 * self.n

    @property
    def flats(self) -> list[torch.Tensor]:
        """Both buffers."""
        return [self.compressed_flat, self.dense_flat]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of `parameters`."""
        return self.layout.names + self.dense_layout.names

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each of `parameters`."""
        return {name: tuple(p.shape) for name, p in zip(self.names, self.parameters, strict=True)}

    @property
    def frozen(self) -> set[str]:
        """Names of the parameters that don't train just now."""
        return {name for (name, _), trains in zip(self._every, self._trainable, strict=True) if not trains}

    @property
    def stale(self) -> bool:
        """Whether a parameter was frozen or unfrozen since this was made."""
        return self.trainable_now() != self._trainable

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The compressed parameters, then the dense ones."""
        return self.compressed + self.dense

    def local(self) -> dict[str, torch.Tensor]:
        """Name -> copy, in fp32, of every gradient there is, as it is in `p.grad`."""
        return {name: p.grad.float().clone() for name, p in self._every if p.grad is not None}

    def put_back(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Set `p.grad` to what `local` returned."""
        for name, parameter in self._every:
            if name in gradients:
                parameter.grad = gradients[name].to(parameter)

    @property
    def present(self) -> list[bool]:
        """Which of `parameters` have a gradient."""
        return [parameter.grad is not None for parameter in self.parameters]

    def collect(self, scale: float) -> None:
        """Fill the buffers with every `p.grad` / scale, 0 where there is none."""
        _fill(self.layout, self.compressed_flat, self.compressed, scale)
        self.collect_dense(scale)

    def collect_dense(self, scale: float) -> None:
        """As `collect`, of the dense ones alone."""
        _fill(self.dense_layout, self.dense_flat, self.dense, scale)

    def local_gradient(self, scale: float) -> LocalGradient:
        """The compressed ones: as they are in `p.grad`, or on a GPU from `compressed_flat`, where they are put."""
        if self.device.type == "cuda":
            _fill(self.layout, self.compressed_flat, self.compressed, scale)
            return LocalGradient.of(self.compressed_flat, self.layout)
        parts = [None if p.grad is None else p.grad.reshape(-1) for p in self.compressed]
        return LocalGradient(parts, self.layout, scale)

    def assign(
        self, compressed: Decoded, dense: torch.Tensor, present: list[bool], scale: float, factors: Sequence[float]
    ) -> None:
        """Write the averages into `p.grad` wherever `present`, making a gradient where there is none.

        Args:
            compressed: the average of `compressed`, multiplied here by a factor for each parameter.
            dense: the average of `dense`, fp32 [d], multiplied here by `scale`.
            present: of each parameter.
            scale: the loss scale.
            factors: of each compressed parameter.
        """
        few, rest = present[: len(self.compressed)], present[len(self.compressed) :]
        if isinstance(compressed, Dense):
            _write(self.layout, compressed.values, self.compressed, few, factors)
        else:
            parts = zip(self.compressed, few, by_tensor(compressed, self.layout), factors, strict=True)
            for parameter, wanted, part, factor in parts:
                if wanted:
                    _write_at(parameter, *part, factor)
        _write(self.dense_layout, dense, self.dense, rest, [scale] * len(self.dense))

    def fill(self, value: float, present: list[bool]) -> None:
        """Let every `p.grad` that is `present` be `value`."""
        for parameter, wanted in zip(self.parameters, present, strict=True):
            if wanted:
                parameter.grad = torch.full_like(parameter, value)


def check_shards(compressor: Compressor, names: Set[str], smallest: Mapping[str, tuple[int, ...]]) -> None:
    """ValueError where the last rank of a replica has nothing to compress, or shards that the compressor can't.

    Args:
        names: of the tensors that are compressed.
        smallest: name -> shape of that rank's shard, of every parameter.
    """
    taken = {name: shape for name, shape in smallest.items() if name in names}
    if taken and not any(prod(shape) for shape in taken.values()):
        allowed = "a mesh with fewer ranks in a replica, or larger tensors: each rank needs a part of some tensor"
        raise refusal("shards of the tensors that are compressed", "a rank whose shards are all empty", allowed)
    compressor.check_shards(taken)


# Lists of tensors are copied in one call, which on a GPU is one launch where they are contiguous and of one type.


def _fill(layout: Layout, flat: torch.Tensor, parameters: list[nn.Parameter], scale: float) -> None:
    """Let `flat` be every `p.grad` / scale, 0 where there is none."""
    views = layout.views(flat)
    grads = [(view, p.grad) for view, p in zip(views, parameters, strict=True) if p.grad is not None]
    if len(grads) < len(parameters):
        flat.zero_()
    if grads:
        torch._foreach_copy_([view for view, _ in grads], [grad for _, grad in grads])
    if scale != 1:
        flat.div_(scale)


@torch.no_grad()
def _write(
    layout: Layout, values: torch.Tensor, parameters: list[nn.Parameter], wanted: list[bool], factors: Sequence[float]
) -> None:
    """Let every `p.grad` that is `wanted` be its part of `values` (fp32 [n]) times its factor."""
    copied = []
    for parameter, view, wants, factor in zip(parameters, layout.views(values), wanted, factors, strict=True):
        if not wants:
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        if factor == 1:
            copied.append((parameter.grad, view))
        elif parameter.grad.dtype == view.dtype:
            torch.mul(view, factor, out=parameter.grad)
        else:
            parameter.grad.copy_(view * factor)
    if copied:
        torch._foreach_copy_([grad for grad, _ in copied], [view for _, view in copied])


@torch.no_grad()
def _write_at(parameter: nn.Parameter, places: torch.Tensor | None, values: torch.Tensor, factor: float) -> None:
    """Let the gradient be `values` times `factor` at `places`, and 0 elsewhere; without places, everywhere."""
    if factor != 1:
        values = values * factor
    if places is None:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.copy_(values.view(parameter.shape))
        return
    # The copy of a flat average that is 0 nearly everywhere would cost more than all else.
    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
    view, index = locate(places, grad)
    view[index] = values.to(grad.dtype)
    parameter.grad = grad
