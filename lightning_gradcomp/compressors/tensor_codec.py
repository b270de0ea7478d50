"""The base of compressors that encode one tensor at a time, and the packing of all encodings into a payload."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import torch

from lightning_gradcomp.compressors.base import Codec, check_unchanged
from lightning_gradcomp.compressors.decoded import Chunked
from lightning_gradcomp.compressors.error_feedback import ErrorFeedback
from lightning_gradcomp.compressors.kernels.bits import look_up, padded, zeros
from lightning_gradcomp.compressors.kernels.rng import Draws
from lightning_gradcomp.compressors.kernels.rows import Rows
from lightning_gradcomp.compressors.layout import Layout, Slice, chunks
from lightning_gradcomp.errors import refusal


@dataclass(kw_only=True)
class TensorCodec(Codec):
    """The base of compressors that encode one tensor at a time. A subclass needs only `encode` and `decode`.

    Sizes come from encoding zeros once. This class provides packing, error feedback, sums in worker order and
    topologies.

    Args:
        error_feedback: add what was not sent to the next gradient.
    """

    tensor_by_tensor: ClassVar[bool] = True
    random: ClassVar[bool] = False
    """True if `encode` or `decode` uses `self.draws`, a function of (`self.seed`, worker, step)."""
    seed: ClassVar[int] = 0
    draws: ClassVar[Draws]
    """Set on a copy for each tensor and step if `random`."""
    error_feedback: bool = True

    @abstractmethod
    def encode(self, x: torch.Tensor) -> torch.Tensor | Sequence[torch.Tensor]:
        """The parts of x (fp32 [n], finite): one tensor or several, of any dtype. Sizes are a function of n alone."""

    @abstractmethod
    def decode(self, parts: Sequence[torch.Tensor], n: int) -> torch.Tensor:
        """The decoded tensor (fp32 [n]) from the parts that `encode` returned, bit-identical on every rank."""

    @property
    def chunk(self) -> int | None:
        """Number of elements at whose multiples a tensor's encoding can be cut; None if it can only be decoded whole.

        With a number, decoding works on chunks that fit the processor's cache. 0-d parts then belong to the whole
        tensor; the first dimension of all other parts runs along it.
        """
        return None

    def for_tensor(self, name: str, shape: tuple[int, ...]) -> TensorCodec:
        """Returns the codec for this parameter or some of its rows: self, unless options depend on name or shape."""
        return self

    def for_tensors(self, layout: Layout) -> TensorCodec | None:
        """Returns a codec for all tensors of a layout at once, which saves calls; None if there is none.

        Its `encode` takes the tensors end to end, fp32 [layout.n], and returns each part of all tensors end to end, 0-d
        parts as a vector. Its `decode` takes such parts. Each tensor must decode to the values that it has alone, but
        for the rounding of sums.
        """
        return None

    def state_for(self, optimizer: torch.optim.Optimizer | None) -> ErrorFeedback:
        return super().state_for(optimizer) if self.error_feedback else ErrorFeedback()

    # Packing: the parts of all tensors, end to end, each at a multiple of 4 bytes

    _step: ClassVar[Draws | None] = None
    """Set by `for_step` if `random`."""

    def for_step(self, worker: int, step: int) -> TensorCodec:
        if not self.random:
            return self
        _ = self._known  # the copy shares it
        drawing: Any = copy.copy(self)
        drawing._step = Draws(self.seed, worker, step)
        return drawing

    def payload_bytes(self, layout: Layout) -> int:
        return self._places(layout, torch.device("cpu"))[1]

    def pack(self, flat: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Chunked]:
        """The payload: the parts of all tensors. On a GPU it is decoded once, which takes memory but fewer launches."""
        places, length = self._places(layout, flat.device)
        payload = torch.zeros(length, dtype=torch.uint8, device=flat.device)  # pads with zeros between parts
        decoded = []
        for one in places:
            x = flat[one.start : one.stop]
            version = x._version
            parts = _parts(self._prepared(one).encode(x))
            check_unchanged(f"{type(one.codec).__name__}.encode", x, version)
            got = [(part.dtype, tuple(part.shape)) for part in parts]
            if got != one.allowed:
                what = f"{type(one.codec).__name__}.encode(x {list(x.shape)})"
                raise refusal(what, got, f"{one.allowed}, as for zeros: sizes are a function of n alone")
            one.write(payload, parts)
            if flat.is_cuda:
                decoded.append(self._prepared(one).decode(parts, one.n))
        if flat.is_cuda:
            return payload, Chunked([(one.start, one.stop) for one in places], decoded.__getitem__)
        return payload, self.unpack(payload, layout)

    def unpack(self, payload: torch.Tensor, layout: Layout) -> Chunked:
        """All tensors, decoded on demand."""
        bounds: list[tuple[int, int]] = []
        pieces: list[tuple[Encoding, TensorCodec, tuple[int, int]]] = []
        for one in self._places(layout, payload.device)[0]:
            size = None if len(one.names) > 1 else one.codec.chunk
            cuts = chunks(0, one.n, payload.device, multiple=size) if size else [(0, one.n)]
            codec = self._prepared(one)
            bounds += [(one.start + start, one.start + stop) for start, stop in cuts]
            pieces += [(one, codec, cut) for cut in cuts]

        def values(number: int) -> torch.Tensor:
            one, codec, (start, stop) = pieces[number]
            parts = [part.read(payload) for part in one.parts]
            if stop - start < one.n and (size := codec.chunk):
                first, last = start // size, -(-stop // size)
                parts = [
                    part[first * place.rows_per_chunk : last * place.rows_per_chunk] if part.dim() else part
                    for part, place in zip(parts, one.parts, strict=True)
                ]
            return codec.decode(parts, stop - start)

        return Chunked(bounds, values)

    def _prepared(self, one: Encoding) -> TensorCodec:
        """Returns the codec of these tensors in this step, with `draws` if `random`."""
        return one.codec._with_draws(self._step.of(one.name)) if self.random and self._step else one.codec

    def _with_draws(self, draws: Draws) -> TensorCodec:
        drawing: Any = copy.copy(self)
        drawing.draws = draws
        return drawing

    def _encode_zeros(self, name: str, n: int) -> list[torch.Tensor]:
        codec = self._with_draws(Draws(0, 0, 0).of(name)) if self.random else self
        return _parts(codec.encode(torch.zeros(n, dtype=torch.float32)))

    @cached_property
    def _known(self) -> dict[tuple[Layout, torch.device], tuple[list[Encoding], int]]:
        return {}

    def _places(self, layout: Layout, device: torch.device) -> tuple[list[Encoding], int]:
        """What is encoded at once, where it is in a payload, and the length of the payload."""
        if (layout, device) not in self._known:
            found, end = [], 0
            for piece in layout.pieces(device):
                codec = self.for_tensors(piece.layout) if len(piece.layout.names) > 1 else None
                for each in [piece] if codec else piece.tensors():
                    found.append(self._encoding(each, codec, end))
                    end = found[-1].end
            self._known[layout, device] = found, end
        return self._known[layout, device]

    def _encoding(self, piece: Slice, together: TensorCodec | None, begin: int) -> Encoding:
        """The encoding of a piece whose bytes start at `begin`: by the codec `together`, or of a single tensor."""
        layout = piece.layout
        codecs = [self.for_tensor(name, shape) for name, shape in zip(layout.names, layout.shapes, strict=True)]
        parts: list[_Part] = []
        for name, n, codec in zip(layout.names, layout.sizes, codecs, strict=True):
            encoded = codec._encode_zeros(name, n)
            parts = parts or [_Part([], part.shape[1:], part.dtype, part.dim() == 0) for part in encoded]
            for place, part in zip(parts, encoded, strict=True):
                place.places.append(slice(begin, begin + part.nbytes))
                begin += padded(part.nbytes)
        codec = together or codecs[0]
        if not together and codec.chunk:
            for place, part in zip(parts, codec._encode_zeros(layout.names[0], codec.chunk), strict=True):
                place.rows_per_chunk = part.shape[0] if part.dim() else 0
        return Encoding(layout.names, piece.start, layout.n, codec, parts, begin)


@dataclass(kw_only=True)
class ScaledLevels(TensorCodec):
    """The base of codecs that send a scale for each tensor, and a code of few bits for each element.

    `encode` returns the scale, 0-d, or of several tensors, `_rows`, [m]; then the packed codes, uint8.
    """

    _rows: ClassVar[Rows | None] = None
    """Several tensors. `for_tensors` sets them."""

    @property
    @abstractmethod
    def chunk(self) -> int:
        """Number of codes at whose multiples each tensor ends."""

    @abstractmethod
    def levels(self, device: torch.device) -> torch.Tensor:
        """What the codes in each byte stand for, as multiples of the scale: fp32 [bytes, codes]."""

    def for_tensors(self, layout: Layout) -> TensorCodec:
        codec: Any = replace(self)
        codec._rows = Rows.of(layout.sizes)
        return codec

    def decode(self, parts: Sequence[torch.Tensor], n: int) -> torch.Tensor:
        scale, packed = parts
        levels = self.levels(packed.device)
        if not self._rows:
            return look_up(levels * scale, packed)[:n]
        values = self._rows.unpad(look_up(levels, packed), self.chunk)
        return self._rows.view(values).mul_(*self._rows.spread(scale)).view(-1)


@dataclass
class _Part:
    """One part of an encoding: where its bytes of each tensor are in the payload, its shape and its dtype."""

    places: list[slice]
    rest: torch.Size
    """The shape without the first dimension, which runs along the tensors."""
    dtype: torch.dtype
    single: bool
    """True if each tensor has a 0-d part."""
    rows_per_chunk: int = 0

    @cached_property
    def shape(self) -> torch.Size:
        if self.single and len(self.places) == 1:
            return torch.Size(())
        row = self.rest.numel() * self.dtype.itemsize
        nbytes = sum(place.stop - place.start for place in self.places)
        return torch.Size((nbytes // row if row else 0, *self.rest))

    @cached_property
    def spacing(self) -> int | None:
        """Bytes from one tensor's part to the next one's, if they are equally long; else None."""
        apart = {after.start - before.start for before, after in pairwise(self.places)}
        lengths = {place.stop - place.start for place in self.places}
        return max(apart, default=1) if len(apart) < 2 and len(lengths) == 1 else None

    def rows_of(self, payload: torch.Tensor) -> torch.Tensor:
        """The bytes of equally spaced parts, a row for each tensor."""
        first, spacing = self.places[0], self.spacing or 1
        size = len(self.places), first.stop - first.start
        return payload.as_strided(size, (spacing, 1), payload.storage_offset() + first.start)

    def read(self, payload: torch.Tensor) -> torch.Tensor:
        if len(self.places) == 1:
            own = payload[self.places[0]]
        elif self.spacing:
            own = self.rows_of(payload).reshape(-1)
        else:
            own = torch.cat([payload[place] for place in self.places])
        if own.storage_offset() % self.dtype.itemsize:  # 8-byte elements at an odd multiple of 4
            own = own.clone()
        return own.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Encoding:
    """Tensors that one call encodes: a single one, or consecutive ones. Their bytes end at `end` of the payload.

    Each tensor has its parts end to end, padded to 4 bytes, as if it were encoded alone.
    """

    names: tuple[str, ...]
    start: int
    n: int
    codec: TensorCodec
    parts: list[_Part]
    end: int

    @property
    def name(self) -> str:
        return self.names[0]

    @cached_property
    def allowed(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        return [(part.dtype, tuple(part.shape)) for part in self.parts]

    @property
    def stop(self) -> int:
        return self.start + self.n

    def write(self, payload: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        found = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
        if len(self.names) == 1:
            for place, part in zip(self.parts, found, strict=True):
                payload[place.places[0]].copy_(part)
            return
        if all(place.spacing for place in self.parts):
            for place, part in zip(self.parts, found, strict=True):
                place.rows_of(payload).copy_(part.view(len(self.names), -1))
            return
        by_part = [
            part.split([each.stop - each.start for each in place.places])
            for place, part in zip(self.parts, found, strict=True)
        ]
        padding, rows = zeros(3, torch.uint8, payload.device), []
        for of_tensor in zip(*by_part, strict=True):
            for row in of_tensor:
                rows += [row, padding[: -len(row) % 4]] if len(row) % 4 else [row]
        torch.cat(rows, out=payload[self.parts[0].places[0].start : self.end])


def _parts(encoded: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [encoded] if isinstance(encoded, torch.Tensor) else list(encoded)
