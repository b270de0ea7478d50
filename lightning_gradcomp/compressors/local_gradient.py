"""A worker's gradient, read piece by piece.

On a CPU a piece is a chunk of one parameter: what is still in the processor's cache is cheap to read again. On a GPU it
is as many parameters at once as are treated alike: each call costs the host more than a GPU needs for a small tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from lightning_gradcomp.compressors.decoded import probe
from lightning_gradcomp.compressors.layout import CHUNK, Layout, chunks


class Piece(NamedTuple):
    """Some elements of a gradient.

    Args:
        numbers: of the parameters that they belong to, one or, whole, consecutive ones.
        part: where they are in the flat buffer.
        own: where they are in the one parameter.
        g: they themselves, fp32; valid until the next piece is read.
    """

    numbers: range
    part: slice
    own: slice
    g: torch.Tensor

    def plus(self, tensors: Sequence[torch.Tensor], alpha: float, out: torch.Tensor) -> torch.Tensor:
        """out = g + alpha · the same elements of the layout's `tensors`. `out` may share g's memory."""
        same = [tensors[number].detach().reshape(-1) for number in self.numbers]
        if len(same) == 1:
            return torch.add(self.g, same[0][self.own], alpha=alpha, out=out)
        torch._foreach_add_(out.copy_(self.g).split([len(each) for each in same]), same, alpha=alpha)
        return out


class LocalGradient:
    """The gradients of a layout's parameters in fp32, without the loss scale.

    Args:
        parts: each parameter's gradient, 1-D, on a CPU, of any floating-point type; None where there is none, which
            counts as 0.
        layout: the parameters.
        scale: the loss scale that is in `parts`.
    """

    def __init__(self, parts: Sequence[torch.Tensor | None], layout: Layout, scale: float = 1.0) -> None:
        self._parts, self._layout, self._scale = parts, layout, scale
        self._chunk, self._flat = torch.empty(CHUNK, dtype=torch.float32), torch.empty(0, dtype=torch.float32)
        self._probes = [torch.zeros((), dtype=torch.float32)]

    @classmethod
    def of(cls, flat: torch.Tensor, layout: Layout) -> LocalGradient:
        """The gradient that is in a flat fp32 buffer, on any device."""
        gradient = cls(flat.split(layout.sizes), layout)
        gradient._flat, gradient._probes = flat, [flat.new_zeros(())]
        return gradient

    def pieces(self, treatments: Sequence[Hashable] = ()) -> Iterator[Piece]:
        """All of it.

        Args:
            treatments: of each parameter; those with equal ones may be in a piece together. Without any, all may.
        """
        if self._flat.is_cuda:
            yield from self._together(treatments or [None] * len(self._layout.names))
            return
        for number, (start, stop) in enumerate(self._layout.bounds):
            for begin, end in chunks(start, stop, self._flat.device):
                own = slice(begin - start, end - start)
                yield Piece(range(number, number + 1), slice(begin, end), own, self._read(number, own))

    def _together(self, treatments: Sequence[Hashable]) -> Iterator[Piece]:
        bounds = self._layout.bounds
        for _, group in groupby(range(len(bounds)), key=treatments.__getitem__):
            alike = list(group)
            first, last = alike[0], alike[-1]
            part = slice(bounds[first][0], bounds[last][1])
            self._probes.append(probe(self._flat[part]))
            yield Piece(range(first, last + 1), part, slice(None), self._flat[part])

    def _read(self, number: int, own: slice) -> torch.Tensor:
        """A chunk of a parameter's gradient; valid until the next call."""
        part, chunk = self._parts[number], self._chunk[: own.stop - own.start]
        if part is None:
            return chunk.zero_()
        if self._scale != 1:
            chunk.copy_(part[own]).div_(self._scale)
        else:
            chunk = part[own].float()  # no copy where it is fp32 already
        self._probes.append(probe(chunk))
        return chunk

    def copy_to(self, flat: torch.Tensor) -> None:
        """flat (fp32 [n]) becomes the gradient."""
        for piece in self.pieces():
            flat[piece.part] = piece.g

    @property
    def finite(self) -> torch.Tensor:
        """Whether everything that was read is: 0-d bool, on the gradients' device."""
        finite = torch.stack(self._probes).isfinite().all()
        if finite.is_cuda or finite:
            return finite
        return torch.stack([(part / self._scale).isfinite().all() for part in self._parts if part is not None]).all()
