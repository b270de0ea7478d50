"""Formats of few bits for dense averages: blocks of numbers that ranks send, add and round once more.

A block lies within one tensor, and its random draws follow from its place in the model. What a tensor becomes therefore
does not depend on the tensors that travel with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch.nn.functional import pad

from lightning_gradcomp.compressors.decoded import Dense
from lightning_gradcomp.compressors.kernels import eden
from lightning_gradcomp.compressors.kernels.bits import padded
from lightning_gradcomp.compressors.kernels.int8 import GROUP, add_int8, int8_bytes, pack_int8, unpack_int8
from lightning_gradcomp.compressors.kernels.rng import row_seeds
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.payloads import Payloads

Key = tuple[int, ...]
"""Numbers that differ between the averages of a run, for random draws."""


class FewBits(ABC):
    """A format of numbers in blocks. Ranks with the same key can add what they decode."""

    block: ClassVar[int]
    """Number of elements in a block."""

    @abstractmethod
    def length(self, shape: tuple[int, ...]) -> int:
        """Number of elements of a tensor after `put`: whole blocks."""

    @abstractmethod
    def nbytes(self, n: int) -> int:
        """Bytes of n elements after `pack`: a multiple of 4, so that fp32 numbers may follow."""

    @abstractmethod
    def put(self, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], key: Key) -> None:
        """Fill each of `outs`, fp32 [length(shape)], with the blocks of a tensor."""

    @abstractmethod
    def pack(self, blocks: torch.Tensor, out: torch.Tensor, seeds: torch.Tensor) -> None:
        """Round blocks, fp32 [..., n], to `out`, uint8 [..., nbytes(n)]. Rows are contiguous.

        `seeds`: one for each block, int32 [..., n / block].
        """

    @abstractmethod
    def add(self, packed: torch.Tensor, total: torch.Tensor) -> None:
        """Add packed blocks to `total`, fp32 [n], contiguous."""

    @abstractmethod
    def unpack(self, packed: torch.Tensor, out: torch.Tensor, key: Key, *, add: bool = False) -> None:
        """Fill `out`, fp32 [..., n], with the values of packed blocks, uint8 [..., nbytes(n)]. Rows are contiguous.

        With `add`, add them to it.
        """

    @abstractmethod
    def take(self, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor of this shape in the values of its blocks, fp32 [length(shape)]."""


class Int8Blocks(FewBits):
    """8 bits, with an fp32 scale for each 256 elements of a tensor and stochastic rounding."""

    block = GROUP

    def length(self, shape: tuple[int, ...]) -> int:
        return GROUP * -(-prod(shape) // GROUP)

    def nbytes(self, n: int) -> int:
        return int8_bytes(n)

    def put(self, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], key: Key) -> None:
        flats = [tensor.reshape(-1) for tensor in tensors]
        torch._foreach_copy_([out[: len(flat)] for flat, out in zip(flats, outs, strict=True)], flats)
        for flat, out in zip(flats, outs, strict=True):
            if len(flat) < len(out):
                out[len(flat) :].zero_()

    def pack(self, blocks: torch.Tensor, out: torch.Tensor, seeds: torch.Tensor) -> None:
        pack_int8(blocks, out, seeds)

    def add(self, packed: torch.Tensor, total: torch.Tensor) -> None:
        add_int8(packed, total)

    def unpack(self, packed: torch.Tensor, out: torch.Tensor, key: Key, *, add: bool = False) -> None:
        (add_int8 if add else unpack_int8)(packed, out)

    def take(self, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return values[: prod(shape)].view(shape)


@dataclass(frozen=True)
class RotatedBlocks(FewBits):
    """1 to 4 bits, with a bf16 scale for each 64 rotated elements (kernels/eden.py).

    Blocks lie inside rows, so that a row of zeros stays zero: in an embedding, most rows have no gradient. The last
    block of a row is filled with zeros.
    """

    bits: int
    block = eden.BLOCK

    def length(self, shape: tuple[int, ...]) -> int:
        return shape[0] * self.block * -(-prod(shape[1:]) // self.block)

    def nbytes(self, n: int) -> int:
        return padded(eden.eden_bytes(n, self.bits))

    def put(self, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], key: Key) -> None:
        for tensor, out in zip(tensors, outs, strict=True):
            turn = eden.rotation(out.device, *key)
            rows = tensor.reshape(len(tensor), -1).float()
            if spare := -rows.size(1) % self.block:
                rows = pad(rows, (0, spare))
            blocks = rows.view(-1, self.block)
            # A product of fixed size each, so that a row's rounding errors don't depend on the rows beside it.
            at_once = len(blocks) if out.is_cuda else eden.CHUNK // self.block
            for part, result in zip(blocks.split(at_once), out.view(-1, self.block).split(at_once), strict=True):
                torch.mm(part, turn, out=result)

    def pack(self, blocks: torch.Tensor, out: torch.Tensor, seeds: torch.Tensor) -> None:
        end = eden.eden_bytes(blocks.size(-1), self.bits)
        eden.pack_eden(blocks, out[..., :end], self.bits, seeds)
        if end < out.size(-1):
            out[..., end:] = 0

    def add(self, packed: torch.Tensor, total: torch.Tensor) -> None:
        eden.add_eden(packed, total, self.bits)

    def unpack(self, packed: torch.Tensor, out: torch.Tensor, key: Key, *, add: bool = False) -> None:
        eden.unpack_eden(packed, eden.rotation(out.device, *key), out, self.bits, add=add)

    def take(self, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return values.view(shape[0], -1)[:, : prod(shape[1:])].reshape(shape)


FORMATS: dict[str, FewBits] = {"int8": Int8Blocks(), **{f"eden{bits}": RotatedBlocks(bits) for bits in eden.LEVELS}}
"""The formats by their name in `Compressor.wire`."""


@dataclass(frozen=True)
class FewBitPayloads(Payloads):
    """Payloads of unbiased estimates in few bits, for pushes to a parameter server. The key is worker and step."""

    form: FewBits
    key: Key

    def payload_bytes(self, layout: Layout) -> int:
        return self.form.nbytes(sum(self._lengths(layout)))

    def pack(self, flat: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Dense]:
        lengths = self._lengths(layout)
        blocks = flat.new_empty(sum(lengths))
        self.form.put(layout.views(flat), blocks.split(lengths), self.key)
        seeds = row_seeds(torch.arange(len(blocks) // self.form.block, device=flat.device), *self.key)
        payload = torch.empty(self.payload_bytes(layout), dtype=torch.uint8, device=flat.device)
        self.form.pack(blocks, payload, seeds)
        return payload, self.unpack(payload, layout)

    def unpack(self, payload: torch.Tensor, layout: Layout) -> Dense:
        lengths = self._lengths(layout)
        values = torch.empty(sum(lengths), dtype=torch.float32, device=payload.device)
        self.form.unpack(payload, values, self.key)
        rows = zip(values.split(lengths), layout.shapes, strict=True)
        return Dense(torch.cat([self.form.take(row, shape).reshape(-1) for row, shape in rows]))

    def _lengths(self, layout: Layout) -> list[int]:
        return [self.form.length(shape) for shape in layout.shapes]
