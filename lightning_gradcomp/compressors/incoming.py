"""A rank's gradients on their way into a memory, piece by piece: what is still in the cache is cheap to read again."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gradcomp.compressors.layout import IN_CACHE, Layout, cut
from lightning_gradcomp.lazy import torch


def probe(flat: torch.Tensor) -> torch.Tensor:
    """A number (0-d) that is not finite where an element of `flat` is not; the sum, on a CPU, may overflow besides.

    A sum takes a CPU a third of the time that an exact answer takes. A GPU's must be exact: to look at it would be to
    wait for it.
    """
    return torch.linalg.vector_norm(flat, torch.inf) if flat.is_cuda else flat.sum()


def all_finite(flat: torch.Tensor) -> torch.Tensor:
    """Whether there is no NaN or infinity in `flat`: 0-d bool, where `flat` is."""
    finite = probe(flat).isfinite()
    return finite if flat.is_cuda or finite else flat.isfinite().all()


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
        self._probes = [torch.zeros((), device=flat.device)]

    @classmethod
    def of(cls, flat: torch.Tensor, layout: Layout) -> Incoming:
        """What lies in a flat fp32 buffer already."""
        return cls([flat[start:stop] for start, stop in layout.bounds], layout, flat)

    def piece(self, number: int, start: int, stop: int) -> torch.Tensor:
        """Elements start to stop (of a `cut`) of a parameter's gradient, to be read before the next is asked for."""
        part, piece = self._parts[number], self._piece[: stop - start]
        if part is None:
            return piece.zero_()
        if self._scale != 1:
            piece.copy_(part[start:stop]).div_(self._scale)
        else:
            piece = part[start:stop].float()  # no copy, where it is fp32 already
        self._probes.append(probe(piece))
        return piece

    def whole(self) -> torch.Tensor:
        """All of them in the flat buffer."""
        for number, (start, stop) in enumerate(self._layout.bounds):
            for begin, end in cut(start, stop, self._flat.device):
                self._flat[begin:end] = self.piece(number, begin - start, end - start)
        return self._flat

    @property
    def finite(self) -> torch.Tensor:
        """Whether all that was handed out is: 0-d bool, where the gradients are."""
        finite = torch.stack(self._probes).isfinite().all()
        if self._flat.is_cuda or finite:
            return finite
        return torch.stack([(part / self._scale).isfinite().all() for part in self._parts if part is not None]).all()
