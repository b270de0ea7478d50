"""A worker's gradients, read chunk by chunk: what is still in the processor's cache is cheap to read again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lightning_gradcomp.compressors.decoded import probe
from lightning_gradcomp.compressors.layout import CHUNK, Layout, chunks


class LocalGradient:
    """The gradients of a layout's parameters in fp32, without the loss scale.

    Args:
        parts: each parameter's gradient, 1-D, of any floating-point type; None where there is none, which counts as 0.
        layout: the parameters.
        scale: the loss scale that is in `parts`.
        device: of the parts.
    """

    def __init__(
        self, parts: Sequence[torch.Tensor | None], layout: Layout, device: torch.device, scale: float = 1.0
    ) -> None:
        self._parts, self._layout, self._device, self._scale = parts, layout, device, scale
        size = CHUNK if device.type == "cpu" else max(layout.sizes, default=0)
        self._chunk = torch.empty(size, device=device)
        self._probes = [torch.zeros((), device=device)]

    @classmethod
    def of(cls, flat: torch.Tensor, layout: Layout) -> LocalGradient:
        """The gradient that is in a flat fp32 buffer."""
        return cls([flat[start:stop] for start, stop in layout.bounds], layout, flat.device)

    def chunk(self, number: int, start: int, stop: int) -> torch.Tensor:
        """Elements start to stop (of `chunks`) of a parameter's gradient; valid until the next call."""
        part, chunk = self._parts[number], self._chunk[: stop - start]
        if part is None:
            return chunk.zero_()
        if self._scale != 1:
            chunk.copy_(part[start:stop]).div_(self._scale)
        else:
            chunk = part[start:stop].float()  # no copy where it is fp32 already
        self._probes.append(probe(chunk))
        return chunk

    def chunks(self, number: int) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Of a parameter, chunk by chunk: where it is in the flat buffer, where in the parameter, and the gradient."""
        start, stop = self._layout.bounds[number]
        for begin, end in chunks(start, stop, self._device):
            yield slice(begin, end), slice(begin - start, end - start), self.chunk(number, begin - start, end - start)

    def copy_to(self, flat: torch.Tensor) -> None:
        """flat (fp32 [n]) becomes the gradient."""
        for number in range(len(self._parts)):
            for part, _, g in self.chunks(number):
                flat[part] = g

    @property
    def finite(self) -> torch.Tensor:
        """Whether everything that was read is: 0-d bool, on the gradients' device."""
        finite = torch.stack(self._probes).isfinite().all()
        if self._device.type == "cuda" or finite:
            return finite
        return torch.stack([(part / self._scale).isfinite().all() for part in self._parts if part is not None]).all()
