"""A rank's gradients on their way into a memory, piece by piece: what is still in the cache is cheap to read again."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.wire import IN_CACHE, cut
from lightning_gradcomp.lazy import torch


class Incoming:
    """The gradients of a layout's parameters, handed out in fp32 and free of the loss scale.

    Args:
        parts: each parameter's gradient, 1-D, of any floating-point type; None where there is none, which counts as 0.
        layout: the parameters.
        flat: fp32 [n], where `whole` puts them.
        scale: the loss scale that is in `parts`.
    """

    def __init__(
        self, parts: Sequence[torch.Tensor | None], layout: Layout, flat: torch.Tensor, scale: float = 1.0
    ) -> None:
        self._parts, self._layout, self._flat, self._scale = parts, layout, flat, scale
        size = IN_CACHE if flat.device.type == "cpu" else max(layout.sizes, default=0)
        self._piece = torch.empty(size, device=flat.device)
        self._sums = [torch.zeros((), device=flat.device)]

    @classmethod
    def of(cls, flat: torch.Tensor, layout: Layout) -> Incoming:
        """What lies in a flat fp32 buffer already."""
        return cls([flat[start:stop] for start, stop in layout.bounds], layout, flat)

    def piece(self, number: int, start: int, stop: int) -> torch.Tensor:
        """Elements start to stop (of a `cut`) of a parameter's gradient, to be used up before the next is asked for."""
        part, piece = self._parts[number], self._piece[: stop - start]
        if part is None:
            return piece.zero_()
        piece.copy_(part[start:stop])
        if self._scale != 1:
            piece.div_(self._scale)
        self._sums.append(piece.sum())
        return piece

    def whole(self) -> torch.Tensor:
        """All of them in the flat buffer."""
        for number, (start, stop) in enumerate(self._layout.bounds):
            for begin, end in cut(start, stop, self._flat.device):
                self._flat[begin:end] = self.piece(number, begin - start, end - start)
        return self._flat

    @property
    def finite(self) -> bool:
        """Whether all that was handed out is. A finite sum tells at a third of the cost; a large one may lie."""
        if torch.isfinite(torch.stack(self._sums).sum()):
            return True
        return all(bool(torch.isfinite(part / self._scale).all()) for part in self._parts if part is not None)
