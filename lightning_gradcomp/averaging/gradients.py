"""The gradients of a model's trainable parameters as one flat fp32 buffer: the compressed ones, then the dense ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lightning_gradcomp.compressors import Compressor
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.errors import refusal


class Gradients:
    """Which parameters are compressed, and their gradients, collected and assigned afresh at every step.

    Names are those of `model.named_parameters()` without the prefixes that torch.compile adds.

    Raises:
        ValueError: parameters whose gradients can't be laid out flat (sparse embeddings, complex numbers).
    """

    def __init__(self, model: nn.Module, compressor: Compressor) -> None:
        for name, module in model.named_modules():
            if getattr(module, "sparse", False) and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                raise refusal(f"gradients of {name!r}", f"{type(module).__name__}(sparse=True)", "sparse=False")
        self._every = [(name.replace("_orig_mod.", ""), p) for name, p in model.named_parameters()]
        self._trainable = self.trainable_now()
        named = [(name, p) for (name, p), trains in zip(self._every, self._trainable, strict=True) if trains]
        for name, parameter in named:
            if parameter.is_complex():
                raise refusal(f"parameter {name!r}", parameter.dtype, "a real floating-point type")
        shapes = {name: tuple(p.shape) for name, p in self._every}
        names = compressor.choose(shapes)
        self.chosen = {name: shape for name, shape in shapes.items() if name in names}
        """Shape of every parameter that is compressed when it trains."""
        self.left_dense = {name: shape for name, shape in shapes.items() if name not in names}
        """Shape of every other."""
        taken = [(name, p) for name, p in named if name in names]
        left = [(name, p) for name, p in named if name not in names]
        self.layout, self.dense_layout = Layout.of(taken), Layout.of(left)
        self.compressed: list[nn.Parameter] = [p for _, p in taken]
        self.dense: list[nn.Parameter] = [p for _, p in left]
        device = named[0][1].device if named else torch.device("cpu")
        self.flat = torch.zeros(self.layout.n + self.dense_layout.n, device=device)
        self.compressed_flat, self.dense_flat = self.flat[: self.layout.n], self.flat[self.layout.n :]
        self._views = self._views_of(self.compressed_flat, self.dense_flat)

    def _views_of(self, compressed: torch.Tensor, dense: torch.Tensor) -> list[torch.Tensor]:
        return self.layout.views(compressed) + self.dense_layout.views(dense)

    def trainable_now(self) -> list[bool]:
        """Which of the model's parameters require a gradient at this moment."""
        return [parameter.requires_grad for _, parameter in self._every]

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

    def collect(self, scale: float) -> list[bool]:
        """Fill `flat` with every `p.grad` / scale, 0 where there is none; tells where there was one."""
        for view, parameter in zip(self._views, self.parameters, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
        if scale != 1:
            self.flat.div_(scale)
        return [parameter.grad is not None for parameter in self.parameters]

    def assign(self, compressed: torch.Tensor, dense: torch.Tensor, present: list[bool], scale: float) -> None:
        """Write the flat averages · scale into `p.grad` wherever `present`, making a gradient where there is none."""
        for view, parameter, wanted in zip(self._views_of(compressed, dense), self.parameters, present, strict=True):
            if wanted:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(view if scale == 1 else view * scale)
