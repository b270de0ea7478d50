"""A worker's gradient, read piece by piece.

A piece is as many parameters at once as are treated alike: each call costs more than the arithmetic of a small tensor.
On a CPU only small ones are read together, since they are copied, and a large one is several pieces: what is still in
the processor's cache is cheap to read again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch

from lightning_gradcomp.compressors.decoded import probe
from lightning_gradcomp.compressors.layout import CHUNK, Layout, chunks

TOGETHER = CHUNK // 8
"""Elements up to which a CPU reads parameters together: to copy more costs as much as the calls that it saves."""


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
        parts: each parameter's gradient, 1-D, on a CPU, of any floating-point type; None counts as 0.
        layout: the parameters.
        scale: the loss scale that is in `parts`.
    """

    def __init__(self, parts: Sequence[torch.Tensor | None], layout: Layout, scale: float = 1.0) -> None:
        self._parts, self._layout, self._scale = parts, layout, scale
        self._chunk, self._probes = torch.empty(CHUNK, dtype=torch.float32), [torch.zeros((), dtype=torch.float32)]
        self._flat: torch.Tensor | None = None
        self._device = torch.device("cpu")

    @classmethod
    def of(cls, flat: torch.Tensor, layout: Layout) -> LocalGradient:
        """The gradient that is in a flat fp32 buffer, on any device."""
        gradient = cls(flat.split(layout.sizes), layout)
        gradient._flat, gradient._device, gradient._probes = flat, flat.device, [flat.new_zeros(())]
        return gradient

    def pieces(self, treatments: Sequence[Hashable] = ()) -> Iterator[Piece]:
        """All of it.

        Args:
            treatments: of each parameter; those with equal ones may be in a piece together. Without any, all may.
        """
        bounds = self._layout.bounds
        for numbers in self._runs(treatments):
            start, stop = bounds[numbers[0]][0], bounds[numbers[-1]][1]
            if len(numbers) > 1:
                part, own = slice(start, stop), slice(None)
                yield Piece(numbers, part, own, self._probed(self._read_all(numbers, part)))
                continue
            for begin, end in chunks(start, stop, self._device):
                part, own = slice(begin, end), slice(begin - start, end - start)
                yield Piece(numbers, part, own, self._probed(self._read(numbers[0], part, own)))

    def _runs(self, treatments: Sequence[Hashable]) -> list[range]:
        """The parameters, as those that are read together."""
        runs, elements = [], 0
        for number, size in enumerate(self._layout.sizes):
            alike = number and (not treatments or treatments[number] == treatments[number - 1])
            elements += size
            if alike and (self._device.type != "cpu" or elements <= TOGETHER):
                runs[-1] = range(runs[-1].start, number + 1)
            else:
                runs.append(range(number, number + 1))
                elements = size
        return runs

    def _read_all(self, numbers: range, part: slice) -> torch.Tensor:
        """The gradients of several parameters; valid until the next call."""
        if self._flat is not None:
            return self._flat[part]
        chunk = self._chunk[: part.stop - part.start]
        views = chunk.split([self._layout.sizes[number] for number in numbers])
        pairs = [(view, self._parts[number]) for view, number in zip(views, numbers, strict=True)]
        there = [(view, own) for view, own in pairs if own is not None]
        if len(there) < len(pairs):
            chunk.zero_()
        if there:
            torch._foreach_copy_([view for view, _ in there], [own for _, own in there])
        return chunk if self._scale == 1 else chunk.div_(self._scale)

    def _read(self, number: int, part: slice, own: slice) -> torch.Tensor:
        """A chunk of a parameter's gradient; valid until the next call."""
        if self._flat is not None:
            return self._flat[part]
        gradient, chunk = self._parts[number], self._chunk[: own.stop - own.start]
        if gradient is None:
            return chunk.zero_()
        if self._scale != 1:
            return chunk.copy_(gradient[own]).div_(self._scale)
        return gradient[own].float()  # no copy where it is fp32 already

    def _probed(self, piece: torch.Tensor) -> torch.Tensor:
        self._probes.append(probe(piece))
        return piece

    def copy_to(self, flat: torch.Tensor) -> None:
        """flat (fp32 [n]) becomes the gradient."""
        for piece in self.pieces():
            flat[piece.part] = piece.g

    @property
    def finite(self) -> torch.Tensor:
        """True if everything that was read is finite: 0-d bool, on the gradients' device."""
        finite = torch.stack(self._probes).isfinite().all()
        if finite.is_cuda or finite:
            return finite
        return torch.stack([(part / self._scale).isfinite().all() for part in self._parts if part is not None]).all()
