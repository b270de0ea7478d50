"""The base of compressors that encode one tensor at a time, and the packing of all encodings into a payload."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from lightning_gradcomp.compressors.base import Codec
from lightning_gradcomp.compressors.decoded import Chunked
from lightning_gradcomp.compressors.kernels.bits import padded
from lightning_gradcomp.compressors.kernels.rng import Draws
from lightning_gradcomp.compressors.layout import CHUNK, Layout, chunks
from lightning_gradcomp.compressors.updates import Update
from lightning_gradcomp.errors import refusal


@dataclass(kw_only=True)
class TensorCodec(Codec):
    """The base of compressors that encode one tensor at a time. A subclass needs only `encode` and `decode`.

    Sizes come from encoding zeros once. This class provides packing, error feedback, sums in worker order and
    topologies.

    Args:
        error_feedback: add what was not sent to the next gradient.

    Raises:
        ValueError: if an option is out of its range.
    """

    tensor_by_tensor: ClassVar[bool] = True
    random: ClassVar[bool] = False
    """True if `encode` or `decode` uses `self.draws`, a function of (`self.seed`, worker, step)."""
    seed: ClassVar[int] = 0
    draws: ClassVar[Draws]
    """Set on a copy for each tensor and step if `random`."""
    batched: ClassVar[bool] = False
    """True if `encode` and `decode` also accept m tensors of n elements at once, which saves calls for small tensors.

    `encode` then takes x [m, n], where n is a multiple of `chunk`, and gives each part a first dimension of m. `decode`
    takes such parts and returns [m, n]. Each tensor must decode to the same values as alone.
    """

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

    def state_for(self, optimizer: torch.optim.Optimizer | None) -> Update:
        """Nothing accumulates without `error_feedback`."""
        return super().state_for(optimizer) if self.error_feedback else Update()

    # Packing: the parts of all tensors, end to end, each at a multiple of 4 bytes

    _step: ClassVar[Draws | None] = None
    """Set by `for_step` if `random`."""

    def for_step(self, worker: int, step: int) -> TensorCodec:
        """Returns the codec with the draws of this worker's step."""
        if not self.random:
            return self
        _ = self._known  # the copy shares it
        drawing: Any = copy.copy(self)
        drawing._step = Draws(self.seed, worker, step)
        return drawing

    def payload_bytes(self, layout: Layout) -> int:
        """Bytes of the parts of all tensors."""
        return self._places(layout)[1]

    def pack(self, flat: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Chunked]:
        """The payload: the parts of all tensors."""
        places, length = self._places(layout)
        payload = torch.zeros(length, dtype=torch.uint8, device=flat.device)  # pads with zeros between parts
        for one in places:
            x = flat[one.start : one.stop]
            x = x.view(one.many, one.n) if one.many > 1 else x
            parts = _parts(one.codec._drawing(one.name, self._step).encode(x))
            got, allowed = ([(part.dtype, tuple(part.shape)) for part in these] for these in (parts, one.parts))
            if got != allowed:
                what = f"{type(one.codec).__name__}.encode(x {list(x.shape)})"
                raise refusal(what, got, f"{allowed}, as for zeros: sizes are a function of n alone")
            for place, part in zip(one.parts, parts, strict=True):
                place.write(payload, part)
        return payload, self.unpack(payload, layout)

    def unpack(self, payload: torch.Tensor, layout: Layout) -> Chunked:
        """All tensors, decoded on demand."""
        bounds: list[tuple[int, int]] = []
        pieces: list[tuple[TensorCodec, list[torch.Tensor], int]] = []
        for one in self._places(layout)[0]:
            codec = one.codec._drawing(one.name, self._step)
            parts = [part.read(payload) for part in one.parts]
            if one.many > 1 or not (size := codec.chunk):
                bounds.append((one.start, one.stop))
                pieces.append((codec, parts, one.n))
                continue
            for start, stop in chunks(0, one.n, payload.device, multiple=size):
                first, last = start // size, -(-stop // size)
                cut = [
                    part[first * place.rows_per_chunk : last * place.rows_per_chunk] if part.dim() else part
                    for part, place in zip(parts, one.parts, strict=True)
                ]
                bounds.append((one.start + start, one.start + stop))
                pieces.append((codec, cut, stop - start))

        def values(number: int) -> torch.Tensor:
            codec, parts, n = pieces[number]
            return codec.decode(parts, n).view(-1)

        return Chunked(bounds, values)

    def _drawing(self, name: str, step: Draws | None) -> TensorCodec:
        """Returns the codec with `draws` for this tensor if `random`."""
        if not self.random or step is None:
            return self
        drawing: Any = copy.copy(self)
        drawing.draws = step.of(name)
        return drawing

    def _encode_zeros(self, name: str, n: int) -> list[torch.Tensor]:
        zeros = torch.zeros(n, dtype=torch.float32)
        return _parts(self._drawing(name, Draws(0, 0, 0)).encode(zeros))

    @cached_property
    def _known(self) -> dict[Layout, tuple[list[_Encoding], int]]:
        return {}

    def _places(self, layout: Layout) -> tuple[list[_Encoding], int]:
        """Where the encodings of a layout's tensors are in a payload, and its length.

        Consecutive small tensors of one size are encoded together, up to a CPU's chunk.
        """
        if layout in self._known:
            return self._known[layout]
        found: list[_Encoding] = []
        for name, shape, (start, stop) in zip(layout.names, layout.shapes, layout.bounds, strict=True):
            codec, n = self.for_tensor(name, shape), stop - start
            if found and found[-1].joins(codec, n):
                found[-1] = replace(found[-1], many=found[-1].many + 1)
                continue
            per_chunk = codec._encode_zeros(name, codec.chunk) if codec.chunk else None
            parts = []
            for number, part in enumerate(codec._encode_zeros(name, n)):
                rows = per_chunk[number].shape[0] if per_chunk and part.dim() else 0
                parts.append(_Part(0, part.shape, part.dtype, rows))
            found.append(_Encoding(name, start, n, codec, parts))
        end = 0
        for number, one in enumerate(found):
            found[number] = one.placed(end)
            end += sum(padded(part.nbytes) for part in found[number].parts)
        self._known[layout] = found, end
        return found, end


@dataclass(frozen=True)
class _Part:
    """One part of a tensor's encoding: where it begins in the payload, its shape and its dtype."""

    begin: int
    shape: torch.Size
    dtype: torch.dtype
    rows_per_chunk: int

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def _bytes(self, payload: torch.Tensor) -> torch.Tensor:
        return payload[self.begin : self.begin + self.nbytes]

    def read(self, payload: torch.Tensor) -> torch.Tensor:
        own = self._bytes(payload)
        if own.storage_offset() % self.dtype.itemsize:  # 8-byte elements at an odd multiple of 4
            own = own.clone()
        return own.view(self.dtype).view(self.shape)

    def write(self, payload: torch.Tensor, part: torch.Tensor) -> None:
        self._bytes(payload).copy_(part.contiguous().view(-1).view(torch.uint8))


@dataclass(frozen=True)
class _Encoding:
    """Where and how one tensor, or `many` consecutive tensors of n elements, are encoded."""

    name: str
    start: int
    n: int
    codec: TensorCodec
    parts: list[_Part]
    many: int = 1

    @property
    def stop(self) -> int:
        return self.start + self.many * self.n

    def joins(self, codec: TensorCodec, n: int) -> bool:
        """True if the next tensor is encoded together with these.

        Parts of whole words need no padding, so the payload is as long as if each tensor were encoded alone.
        """
        if not codec.batched or codec != self.codec or n != self.n or not (size := codec.chunk):
            return False
        whole = n % size == 0 and all(part.nbytes % 4 == 0 for part in self.parts)
        return whole and (self.many + 1) * n <= CHUNK

    def placed(self, begin: int) -> _Encoding:
        """Returns the encoding with its parts placed in a payload from `begin` on."""
        parts = []
        for part in self.parts:
            shape = part.shape if self.many == 1 else torch.Size((self.many, *part.shape))
            parts.append(replace(part, begin=begin, shape=shape))
            begin += padded(parts[-1].nbytes)
        return replace(self, parts=parts)


def _parts(encoded: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [encoded] if isinstance(encoded, torch.Tensor) else list(encoded)
