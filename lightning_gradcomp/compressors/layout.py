"""Where each parameter lies in the flat buffers. Everything kept between steps is keyed by parameter name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from lightning_gradcomp.lazy import torch


@dataclass(frozen=True)
class Layout:
    """Parameters laid end to end in one flat fp32 buffer of `n` elements, in the model's order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, torch.Tensor]]) -> Layout:
        """The layout of these (name, parameter) pairs."""
        pairs = [(name, tuple(parameter.shape)) for name, parameter in parameters]
        return cls(tuple(name for name, _ in pairs), tuple(shape for _, shape in pairs))

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of each parameter."""
        return [torch.Size(shape).numel() for shape in self.shapes]

    @cached_property
    def n(self) -> int:
        """Elements of all parameters together."""
        return sum(self.sizes)

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """(start, stop) of each parameter in the flat buffer."""
        stops = list(accumulate(self.sizes))
        return list(zip([0, *stops[:-1]], stops, strict=True)) if stops else []

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parts of `flat` in the parameters' shapes, sharing its memory."""
        return [flat[start:stop].view(shape) for (start, stop), shape in zip(self.bounds, self.shapes, strict=True)]

    def split(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Name -> copy of its part of `flat`, in the parameter's shape."""
        return {name: view.clone() for name, view in zip(self.names, self.views(flat), strict=True)}

    def join(self, parts: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
        """A flat buffer from name -> tensor; 0 where a name is missing.

        Raises:
            ValueError: a tensor whose shape is not the parameter's.
        """
        flat = torch.zeros(self.n, device=device)
        for name, shape, view in zip(self.names, self.shapes, self.views(flat), strict=True):
            if name in parts:
                if tuple(parts[name].shape) != shape:
                    raise ValueError(f"state of {name!r}: got shape {tuple(parts[name].shape)}, allowed: {shape}")
                view.copy_(parts[name])
        return flat
