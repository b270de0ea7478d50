"""Where each parameter is in a flat buffer, and how the buffer is cut into chunks and slices."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any

import torch

CHUNK = 262_144
"""Elements that a CPU processes at a time: 1 MiB. With smaller chunks, Python calls cost more than the cache saves."""
GPU_CHUNK = 2**25
"""Elements that a GPU processes at once: 128 MiB. More would need larger buffers, and hardly fewer launches."""


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of torch.compile and activation checkpointing."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def chunks(start: int, stop: int, device: torch.device, multiple: int = 1) -> list[tuple[int, int]]:
    """(start, stop) of chunks of about `CHUNK` elements; one chunk on a GPU.

    The length of all but the last is a multiple of `multiple`.
    """
    size = max(CHUNK // multiple, 1) * multiple if device.type == "cpu" else max(stop - start, 1)
    return [(begin, min(begin + size, stop)) for begin in range(start, stop, size)]


@dataclass(frozen=True)
class Slice:
    """A contiguous part of a flat buffer: its first element, and the layout of the parameters or rows in it."""

    start: int
    layout: Layout

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.start + self.layout.n]

    def tensors(self) -> list[Slice]:
        """Each parameter, or some of its rows, alone."""
        named = zip(self.layout.names, self.layout.shapes, self.layout.bounds, strict=True)
        return [Slice(self.start + start, Layout((name,), (shape,))) for name, shape, (start, _) in named]


@dataclass(frozen=True)
class Layout:
    """Parameters laid end to end in one flat fp32 buffer of `n` elements, in the model's order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, torch.Tensor]]) -> Layout:
        pairs = [(name, tuple(parameter.shape)) for name, parameter in parameters]
        return cls(tuple(name for name, _ in pairs), tuple(shape for _, shape in pairs))

    @cached_property
    def sizes(self) -> list[int]:
        return [torch.Size(shape).numel() for shape in self.shapes]

    @cached_property
    def n(self) -> int:
        return sum(self.sizes)

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """(start, stop) of each parameter in the flat buffer."""
        stops = list(accumulate(self.sizes))
        return list(zip([0, *stops[:-1]], stops, strict=True)) if stops else []

    def slices(self, number: int) -> list[Slice]:
        """The buffer in `number` slices, as equal as cuts between rows allow. Slices may be empty."""
        cuts = [0, *(self._row_near(self.n * part // number) for part in range(1, number)), self.n]
        return [Slice(start, self._between(start, stop)) for start, stop in pairwise(cuts)]

    def parts(self, number: int) -> list[Slice]:
        """The buffer in at most `number` parts, as equal as cuts between parameters allow. No part is empty."""
        starts = [start for start, _ in self.bounds]
        cuts = {min(starts, key=lambda start: abs(start - self.n * part // number)) for part in range(1, number)}
        return [Slice(start, self._between(start, stop)) for start, stop in pairwise(sorted({0, *cuts, self.n}))]

    def pieces(self, device: torch.device) -> list[Slice]:
        """The buffer cut between parameters into what is processed at once.

        On a CPU these are a parameter, or small consecutive ones of one shape that fit in its cache. On a GPU they are
        as many parameters as fit in `GPU_CHUNK` elements, whatever their shapes.
        """
        if device in self._pieces:
            return self._pieces[device]
        on_cpu, first, start = device.type == "cpu", 0, 0
        found = self._pieces[device] = []
        for number, (_, stop) in enumerate([*self.bounds[1:], (0, 0)], 1):
            ends = number == len(self.names) or stop - start > (CHUNK if on_cpu else GPU_CHUNK)
            if ends or (on_cpu and self.shapes[number] != self.shapes[first]):
                found.append(Slice(start, Layout(self.names[first:number], self.shapes[first:number])))
                first, start = number, start + found[-1].layout.n
        return found

    @cached_property
    def _pieces(self) -> dict[torch.device, list[Slice]]:
        return {}

    def _row_near(self, place: int) -> int:
        for (start, stop), shape in zip(self.bounds, self.shapes, strict=True):
            if place < stop:
                row = (stop - start) // shape[0]
                return start + round((place - start) / row) * row
        return self.n

    def _between(self, start: int, stop: int) -> Layout:
        names, shapes = [], []
        for name, (first, last), shape in zip(self.names, self.bounds, self.shapes, strict=True):
            inside = max(0, min(stop, last) - max(start, first))
            if inside:
                names.append(name)
                shapes.append((inside * shape[0] // (last - first), *shape[1:]) if shape else shape)
        return Layout(tuple(names), tuple(shapes))

    def chunks_by(self, rules: Sequence[Any], device: torch.device) -> Iterator[tuple[Any, slice]]:
        """Yield (rule, place) for each chunk of the flat buffer. Chunks are also cut where the rule changes."""
        stop = 0
        for rule, run in groupby(zip(rules, self.sizes, strict=True), key=itemgetter(0)):
            start, stop = stop, stop + sum(size for _, size in run)
            for begin, end in chunks(start, stop, device):
                yield rule, slice(begin, end)

    def cut(self, tensors: Sequence[torch.Tensor], place: slice) -> list[torch.Tensor]:
        """The parts of `tensors`, one for each parameter, that lie at `place` in the flat buffer. Each is 1-D."""
        first = bisect_right(self.bounds, place.start, key=itemgetter(1))
        last = bisect_left(self.bounds, place.stop, key=itemgetter(0))
        return [
            tensors[number].detach().reshape(-1)[max(place.start - start, 0) : place.stop - start]
            for number, (start, _) in enumerate(self.bounds[first:last], first)
        ]

    def copy_except(self, names: Set[str], source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy all parameters but those in `names` from one flat buffer into another."""
        for name, (start, stop) in zip(self.names, self.bounds, strict=True):
            if name not in names:
                target[start:stop] = source[start:stop]

    def zero(self, names: Set[str], flat: torch.Tensor) -> None:
        """Set the parameters in `names` to 0 in a flat buffer."""
        for name, (start, stop) in zip(self.names, self.bounds, strict=True):
            if name in names:
                flat[start:stop] = 0

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of `flat` in the parameters' shapes, sharing its memory."""
        return [part.view(shape) for part, shape in zip(flat.split(self.sizes), self.shapes, strict=True)]

    def split(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Name -> a copy of the parameter's part of `flat`, in its shape."""
        return {name: view.clone() for name, view in zip(self.names, self.views(flat), strict=True)}

    def join(self, parts: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
        """A flat buffer from name -> tensor; 0 where a name is missing."""
        flat = torch.zeros(self.n, dtype=torch.float32, device=device)
        for name, shape, view in zip(self.names, self.shapes, self.views(flat), strict=True):
            if name in parts:
                if tuple(parts[name].shape) != shape:
                    raise ValueError(f"state of {name!r}: got shape {tuple(parts[name].shape)}, allowed: {shape}")
                view.copy_(parts[name])
        return flat
