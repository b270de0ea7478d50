"""What a compressor is: options that check themselves, which tensors it takes, how it averages them.

Most methods need one class of this file: `TensorCodec` (what happens to one tensor), `Codec` (a choice among the
elements of all tensors), or `LossyCompressor` with an `average` of its own (sums instead of payloads).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from lightning_gradcomp.compressors.adam_step import AdamStep, takes_optimizer
from lightning_gradcomp.compressors.decoded import Chunked, Decoded
from lightning_gradcomp.compressors.kernels.bits import padded
from lightning_gradcomp.compressors.kernels.formats import check_format, value_bytes
from lightning_gradcomp.compressors.kernels.rng import Draws
from lightning_gradcomp.compressors.layout import CHUNK, Layout, Slice, chunks
from lightning_gradcomp.compressors.schedules import COMPRESSED, Ramp, Schedule
from lightning_gradcomp.compressors.state import Residual, State
from lightning_gradcomp.errors import is_number, is_whole, refusal

DENSE_START = 22
"""Dense steps at the start of all methods but DGC: an epoch of the digits (1,437 images, 64 a step), on which their
accuracy was measured. Steps, not an epoch, so that a run of one long epoch compresses too."""

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True, kw_only=True)
class Card:
    """A method's line in docs/choosing.md, beside what can be computed.

    Args:
        sends: what travels of a compressed tensor.
        remembers: what each rank keeps between steps.
        pick: when to choose it.
        source: the paper or the code that it comes from.
    """

    sends: str = ""
    remembers: str = "nothing"
    pick: str = ""
    source: str = ""


class Partitions(Protocol):
    """Collectives of topology="two_phase" and "server": worker j averages the partition j of the gradient."""

    slices: Sequence[Slice]
    """The partition of each worker."""
    dense_pull: bool
    """True if the means of partitions travel uncompressed (topology="server")."""

    def scatter(self, payloads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send payload j (uint8) to worker j. Returns what all workers sent to this one, in order."""
        ...

    def gather_partitions(self, payload: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """The payloads of all partitions, from their owners; `lengths` are their bytes."""
        ...


class Collectives(Protocol):
    """What `LossyCompressor.average` may exchange with the others. All but `phase` and `buffer` are collective calls.

    The gradients that are not compressed, and what the workers have to know of each other, travel with the first
    message, or after the last one where there was none. Messages have one length on all workers.
    """

    workers: int
    """Their number, N."""
    worker: int
    """The number of this one."""
    step: int
    """Steps so far, the same on all of them."""

    @property
    def partitions(self) -> Partitions | None:
        """For a method whose partitions are not averaged by `mean_of_payloads`. None with topology="all_gather"."""
        ...

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Adds the time spent inside to "compress", "exchange" or "decompress"."""
        ...

    def buffer(self) -> torch.Tensor:
        """fp32 [n] with any content, for the mean. Always the same."""
        ...

    def mean(self, flat: torch.Tensor) -> torch.Tensor:
        """The mean of `flat` (fp32 [m]) over the workers, with the same bits on all."""
        ...

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of each of `values` (fp32 [m]) over the workers."""
        ...

    def gather(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """The payloads (uint8 [p]) of all workers, in order."""
        ...

    def mean_of_payloads(
        self, codec: PayloadCodec, flat: torch.Tensor, layout: Layout, *, over_senders: bool = False
    ) -> tuple[Decoded, Decoded]:
        """Encodes `flat`, exchanges payloads as the topology says, decodes and adds them in the workers' order.

        Args:
            codec: makes and reads payloads.
            flat: fp32 [n].
            layout: where each parameter is in it.
            over_senders: divide an element's sum by the number of workers that sent it, in place of all.

        Returns:
            The mean, and what this worker sent.
        """
        ...


class CompressorBase:
    """No dataclass: of a class whose bases all are dataclasses, jsonargparse (LightningCLI) takes no subclasses."""


@dataclass(kw_only=True)
class Compressor(CompressorBase):
    """How gradients are averaged. By itself: uncompressed, as `wire_dtype`."""

    card: ClassVar[Card] = Card()
    """The method's line in the docs."""
    needs_optimizer: ClassVar[bool] = False
    """Whether there must be one optimizer, which `check_optimizer` takes. Others work without knowing it."""
    wire_dtype: ClassVar[torch.dtype] = torch.float32
    """In which gradients travel in dense steps."""

    def choose(self, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        """The names, of all parameters in the model's order, that are compressed when they train."""
        return set()

    def check_names(self, names: Iterable[str]) -> None:
        """ValueError for an option that names parameters, and none of all `names`."""

    def schedule(self) -> Schedule | None:
        """Sparsity as a function of (epoch, step), 0 in dense phases; None: always dense."""
        return None

    def check_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """ValueError for an optimizer that this compressor can't work with."""

    def check_shards(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """ValueError where this compressor can't work with each rank's shards of a sharded model.

        Args:
            shapes: of the smallest shard of every tensor that is compressed.
        """

    def for_optimizer(self, optimizer: torch.optim.Optimizer | None) -> Self:
        """With the options whose defaults follow from the optimizer."""
        return self

    def owns_momentum(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Whether the momentum of this optimizer is applied to the local gradient, before it is compressed."""
        return False

    def clip_average(self, parameters: Sequence[torch.Tensor], grad_scale: float) -> None:
        """Clip the averaged gradients of a dense step, which hold the loss scale `grad_scale`."""


@dataclass(kw_only=True)
class LossyCompressor(Compressor, ABC):
    """A compressor that sends less than everything.

    Args:
        min_elements: tensors with fewer elements travel uncompressed, as all 1-D tensors do (biases, norm weights).
        exclude: shell patterns of parameter names that travel uncompressed, e.g. `["head.*"]`.
        warmup_steps: dense steps before compression begins. Default: 22; 0 for DGC and for your own classes.
        warmup_epochs: dense epochs instead of `warmup_steps`; 0 means no warm-up.
        dense_values: format of the uncompressed tensors: "fp32", "bf16", "fp16", "int8" or "int2". The rounding error
            goes into the residual. PowerSGD, which exchanges averages, takes "fp32" only.
        clip_norm: clips each rank's gradient at √N times this norm before it is accumulated (Lin et al. 2018, §3.2).
            Dense steps clip the average at this norm. None: no clipping.

    Raises:
        ValueError: an option out of its range, or both `warmup_steps` and `warmup_epochs`.
    """

    default_warmup_steps: ClassVar[int] = 0
    """What `warmup_steps=None` stands for."""
    not_partitioned_because: ClassVar[str | None] = (
        "the owner of a partition can't average it from the partition's messages alone"
    )
    """Why "two_phase" and "server" can't carry this method's messages; None where they can."""

    min_elements: int = 1024
    exclude: list[str] = field(default_factory=list)
    warmup_steps: int | None = None
    warmup_epochs: int | None = None
    dense_values: str = "fp32"
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        what = type(self).__name__
        if not is_whole(self.min_elements) or self.min_elements < 1:
            raise refusal(f"{what}.min_elements", self.min_elements, "a whole number from 1")
        if isinstance(self.exclude, str) or not isinstance(self.exclude, Sequence):
            raise refusal(f"{what}.exclude", self.exclude, "a list of patterns")
        if self.clip_norm is not None and not (is_number(self.clip_norm) and self.clip_norm > 0):
            raise refusal(f"{what}.clip_norm", self.clip_norm, "None or a finite number above 0")
        check_format(f"{what}.dense_values", self.dense_values)
        for option in ("warmup_steps", "warmup_epochs"):
            if (length := getattr(self, option)) is not None and (not is_whole(length) or length < 0):
                raise refusal(f"{what}.{option}", length, "a whole number from 0")
        if self.warmup_steps is not None and self.warmup_epochs is not None:
            raise refusal(f"{what}.warmup_steps with warmup_epochs", self.warmup_steps, "None: one of the two")

    def check_names(self, names: Iterable[str]) -> None:
        """ValueError for a pattern of `exclude` that no parameter's name fits."""
        names = list(names)
        for pattern in self.exclude:
            if names and not any(fnmatchcase(name, pattern) for name in names):
                allowed = f"patterns of names of parameters, such as {names[-1]!r}"
                raise refusal(f"{type(self).__name__}.exclude", pattern, allowed)

    def compresses(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the parameter `name` of this shape is compressed."""
        excluded = any(fnmatchcase(name, pattern) for pattern in self.exclude)
        return len(shape) > 1 and prod(shape) >= self.min_elements and not excluded

    def choose(self, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        """Those that `compresses` selects."""
        return {name for name, shape in shapes.items() if self.compresses(name, shape)}

    @property
    def final_sparsity(self) -> float:
        """The sparsity once the warm-up is over; `COMPRESSED` for a method that has none."""
        return COMPRESSED

    def with_sparsity(self, sparsity: float) -> LossyCompressor:
        """The compressor in a step of this scheduled sparsity: itself, for a method that has none."""
        return self

    @property
    def dense_steps(self) -> int:
        """Dense steps before the compression begins; 0 where the warm-up counts epochs."""
        if self.warmup_epochs is not None:
            return 0
        return self.default_warmup_steps if self.warmup_steps is None else self.warmup_steps

    def schedule(self) -> Schedule:
        """Dense while warming up, then compressed."""
        if self.warmup_epochs is not None:
            return Ramp((), self.final_sparsity, dense=self.warmup_epochs)
        return Ramp((), self.final_sparsity, dense=self.dense_steps, by="step")

    def remembers(self, optimizer: torch.optim.Optimizer | None) -> type[State]:
        """What error feedback accumulates: Adam's and AdamW's own steps; with any other optimizer, gradients.

        Args:
            optimizer: None for one that is not known, or several.
        """
        return AdamStep if takes_optimizer(optimizer) else Residual

    def owns_momentum(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """As `remembers` says."""
        return self.remembers(optimizer).owns_momentum

    def state(self, layout: Layout, device: torch.device, optimizer: torch.optim.Optimizer | None = None) -> State:
        """What is remembered of these parameters between steps.

        Args:
            layout: the compressed parameters, in the flat buffer's order.
            device: of the gradients.
            optimizer: the only one, if it is known.
        """
        return self.remembers(optimizer)(layout, device)

    def clip_local(self, gradient: Sequence[torch.Tensor], norm: torch.Tensor, workers: int) -> None:
        """Clip a worker's whole gradient at √N · clip_norm, N being the number of workers.

        The mean of N independent gradients has about 1/√N of the norm of one, so √N · clip_norm locally stands in for
        clip_norm on the average.

        Args:
            gradient: flat tensors, clipped in place; of a sharded model, this rank's part of the worker's gradient.
            norm: of the worker's whole gradient, 0-d.
            workers: N.
        """
        if self.clip_norm is not None:
            for part in gradient:
                part.mul_(torch.clamp(workers**0.5 * self.clip_norm / (norm + 1e-6), max=1.0))

    def clip_average(self, parameters: Sequence[torch.Tensor], grad_scale: float) -> None:
        """Vanilla clipping at clip_norm."""
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm * grad_scale)

    @abstractmethod
    def messages(self, layout: Layout) -> list[tuple[str, int]]:
        """What a step exchanges without partitions, in order: ("gather", "mean" or "maximum", bytes)."""

    def partition_bytes(self, partition: Layout, workers: int, dense_pull: bool) -> tuple[int, int]:
        """Bytes that a worker sends to the owner of a partition, and that the owner sends to every worker.

        A payload each way; with `dense_pull` it goes back uncompressed.
        """
        [(_, length)] = self.messages(partition)
        return length, value_bytes(partition.n, self.dense_values) if dense_pull else length

    @abstractmethod
    def average(
        self, flat: torch.Tensor, layout: Layout, collectives: Collectives, state: Any
    ) -> tuple[Decoded, Decoded]:
        """The average of what all workers send of their `flat`, bitwise the same on each, and what this one sent.

        Args:
            flat: what should be sent, fp32 [n]; zeros where this worker's gradient is not finite.
            layout: where each parameter is in it.
            collectives: the other workers.
            state: what `state` made. It is read here. What is written to it must be what `commit` puts in force.

        Returns:
            The mean: `Dense` (values [n]), `Sparse` (ascending int64 indices [k], values [k]) or `Chunked` with
            `is_finite`, fp32. And what this worker sent.
        """


@dataclass(kw_only=True)
class Codec(LossyCompressor):
    """A compressor whose payload every rank can decode by itself: `payload_bytes`, `encode`, `decode`."""

    not_partitioned_because: ClassVar[str | None] = None
    tensor_by_tensor: ClassVar[bool] = False

    @abstractmethod
    def payload_bytes(self, layout: Layout) -> int:
        """Length of what `encode` returns. It depends on nothing else, so it is the same on every rank."""

    @abstractmethod
    def encode(self, flat: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Decoded]:
        """The payload of a flat tensor, and what it decodes to.

        Args:
            flat: what should be sent, fp32 [n], finite.
            layout: where each parameter is in it; in a slice, some rows of them.

        Returns:
            uint8 [payload_bytes(layout)], and what `decode` makes of it.
        """

    @abstractmethod
    def decode(self, payload: torch.Tensor, layout: Layout) -> Decoded:
        """What a payload (uint8 [payload_bytes(layout)]) says, on every rank alike."""

    def payload_codec(self, worker: int, step: int) -> PayloadCodec:
        """What writes and reads the payloads of a worker's step."""
        return self

    def messages(self, layout: Layout) -> list[tuple[str, int]]:
        """One gather of payloads."""
        return [("gather", self.payload_bytes(layout))]

    def average(
        self, flat: torch.Tensor, layout: Layout, collectives: Collectives, state: Any
    ) -> tuple[Decoded, Decoded]:
        """Encode, exchange, decode and add."""
        return collectives.mean_of_payloads(self, flat, layout)


@dataclass(kw_only=True)
class TensorCodec(LossyCompressor):
    """A compressor that is defined by what happens to one tensor: `encode` and `decode` are all that it needs.

    Sizes come from encoding zeros once. Packing, error feedback, sums in the workers' order and topologies come
    from here.

    Args:
        error_feedback: remember what was not sent, and add it to the next gradient.

    Raises:
        ValueError: an option out of its range.
    """

    not_partitioned_because: ClassVar[str | None] = None
    random: ClassVar[bool] = False
    """Whether `encode` or `decode` use `self.draws`, which are then a function of (`self.seed`, worker, step)."""
    seed: ClassVar[int] = 0
    draws: ClassVar[Draws]
    """Set on a copy for each tensor and step, if `random`."""
    batched: ClassVar[bool] = False
    """True if `encode` and `decode` also take m tensors of n elements at once, which saves calls for small tensors.

    `encode` then takes x [m, n], where n is a multiple of `chunk`, and gives each part a first dimension of m. `decode`
    takes such parts and returns [m, n]. Each tensor must get the values that it gets alone.
    """

    error_feedback: bool = True

    @abstractmethod
    def encode(self, x: torch.Tensor) -> torch.Tensor | Sequence[torch.Tensor]:
        """The parts of x (fp32 [n], finite): one tensor or several, of any dtype. Sizes are a function of n alone."""

    @abstractmethod
    def decode(self, parts: Sequence[torch.Tensor], n: int) -> torch.Tensor:
        """fp32 [n] from the parts that `encode` returned, on every rank alike."""

    @property
    def chunk(self) -> int | None:
        """Elements at whose multiples a tensor's encoding can be cut; None where it can be decoded only whole.

        With a number, decoding works on chunks that fit the processor's cache. Parts without a dimension then belong to
        the whole tensor; the rows of all others run along it.
        """
        return None

    def for_tensor(self, name: str, shape: tuple[int, ...]) -> TensorCodec:
        """The codec for this parameter, or for rows of it: itself, unless its options follow from name or shape."""
        return self

    def remembers(self, optimizer: torch.optim.Optimizer | None) -> type[State]:
        """Nothing, without `error_feedback`."""
        return super().remembers(optimizer) if self.error_feedback else State

    def messages(self, layout: Layout) -> list[tuple[str, int]]:
        """One gather of payloads."""
        return [("gather", self._encodings.of(layout)[1])]

    def average(
        self, flat: torch.Tensor, layout: Layout, collectives: Collectives, state: Any
    ) -> tuple[Decoded, Decoded]:
        """Encode, exchange, decode and add."""
        codec = self.payload_codec(collectives.worker, collectives.step)
        return collectives.mean_of_payloads(codec, flat, layout)

    def payload_codec(self, worker: int, step: int) -> PayloadCodec:
        """What writes and reads the payloads of a worker's step."""
        return TensorPayloads(self._encodings, Draws(self.seed, worker, step) if self.random else None)

    @cached_property
    def _encodings(self) -> _Encodings:
        return _Encodings(self)


class PayloadCodec(Protocol):
    """What `Collectives.mean_of_payloads` takes: a `Codec`, or a `TensorCodec`'s `TensorPayloads`."""

    tensor_by_tensor: ClassVar[bool]
    """Whether the payload of some tensors, and then of the others, is what all have together."""

    def payload_bytes(self, layout: Layout) -> int: ...

    def encode(self, flat: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Decoded]: ...

    def decode(self, payload: torch.Tensor, layout: Layout) -> Decoded: ...


@dataclass(frozen=True)
class _Part:
    """One part of a tensor's encoding: where it begins in the payload, and what it is."""

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
        if own.storage_offset() % self.dtype.itemsize:  # 8 bytes an element, at an odd multiple of 4
            own = own.clone()
        return own.view(self.dtype).view(self.shape)

    def write(self, payload: torch.Tensor, part: torch.Tensor) -> None:
        self._bytes(payload).copy_(part.contiguous().view(-1).view(torch.uint8))


@dataclass(frozen=True)
class _Encoding:
    """How a tensor is written, or `many` tensors of n elements together, which follow on each other in the buffer."""

    name: str
    start: int
    n: int
    codec: TensorCodec
    parts: list[_Part]
    many: int = 1

    @property
    def stop(self) -> int:
        return self.start + self.many * self.n

    def takes(self, codec: TensorCodec, n: int) -> bool:
        """Whether the next tensor is written together with these.

        Parts of whole words need no padding, so that the payload is as long as if each were written alone.
        """
        if not codec.batched or codec != self.codec or n != self.n or not (size := codec.chunk):
            return False
        whole = n % size == 0 and all(part.nbytes % 4 == 0 for part in self.parts)
        return whole and (self.many + 1) * n <= CHUNK

    def placed(self, begin: int) -> _Encoding:
        """With the parts in a payload from `begin` on."""
        parts = []
        for part in self.parts:
            shape = part.shape if self.many == 1 else torch.Size((self.many, *part.shape))
            parts.append(replace(part, begin=begin, shape=shape))
            begin += padded(parts[-1].nbytes)
        return replace(self, parts=parts)


class _Encodings:
    """Where the parts of all tensors are in a payload: each begins at a multiple of 4 bytes.

    Small tensors of one size that follow on each other are written together, as many as fill a CPU's chunk.
    """

    def __init__(self, codec: TensorCodec) -> None:
        self._codec = codec
        self._known: dict[Layout, tuple[list[_Encoding], int]] = {}

    def of(self, layout: Layout) -> tuple[list[_Encoding], int]:
        """The encodings of a layout's tensors, and the bytes of them all."""
        if layout not in self._known:
            self._known[layout] = self._lay_out(layout)
        return self._known[layout]

    def _lay_out(self, layout: Layout) -> tuple[list[_Encoding], int]:
        encodings: list[_Encoding] = []
        for name, shape, (start, stop) in zip(layout.names, layout.shapes, layout.bounds, strict=True):
            codec, n = self._codec.for_tensor(name, shape), stop - start
            if encodings and encodings[-1].takes(codec, n):
                encodings[-1] = replace(encodings[-1], many=encodings[-1].many + 1)
                continue
            per_chunk = _sample(codec, name, codec.chunk) if codec.chunk else None
            parts = []
            for number, part in enumerate(_sample(codec, name, n)):
                rows = per_chunk[number].shape[0] if per_chunk and part.dim() else 0
                parts.append(_Part(0, part.shape, part.dtype, rows))
            encodings.append(_Encoding(name, start, n, codec, parts))
        end = 0
        for number, one in enumerate(encodings):
            encodings[number] = one.placed(end)
            end += sum(padded(part.nbytes) for part in encodings[number].parts)
        return encodings, end


def _sample(codec: TensorCodec, name: str, n: int) -> list[torch.Tensor]:
    """What a codec makes of n zeros."""
    return _parts(_with_draws(codec, name, Draws(0, 0, 0)).encode(torch.zeros(n, dtype=torch.float32)))


def _parts(encoded: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [encoded] if isinstance(encoded, torch.Tensor) else list(encoded)


def _with_draws(codec: TensorCodec, name: str, draws: Draws | None) -> Any:
    if not codec.random or draws is None:
        return codec
    drawing: Any = copy.copy(codec)
    drawing.draws = draws.of(name)
    return drawing


class TensorPayloads:
    """The payloads that a `TensorCodec` makes of a flat buffer in one step: the parts of all tensors, end to end.

    Args:
        encodings: the codec's, which say where parts are in them.
        draws: this worker's, if the codec is random.
    """

    tensor_by_tensor: ClassVar[bool] = True

    def __init__(self, encodings: _Encodings, draws: Draws | None) -> None:
        self._encodings, self._draws = encodings, draws

    def payload_bytes(self, layout: Layout) -> int:
        """Bytes of a payload."""
        return self._encodings.of(layout)[1]

    def encode(self, flat: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Chunked]:
        """The payload (uint8) of a flat tensor (fp32 [n]), and what it decodes to."""
        encodings, length = self._encodings.of(layout)
        payload = torch.zeros(length, dtype=torch.uint8, device=flat.device)  # also the bytes between parts
        for one in encodings:
            x = flat[one.start : one.stop]
            x = x.view(one.many, one.n) if one.many > 1 else x
            parts = _parts(_with_draws(one.codec, one.name, self._draws).encode(x))
            got, allowed = ([(part.dtype, tuple(part.shape)) for part in these] for these in (parts, one.parts))
            if got != allowed:
                what = f"{type(one.codec).__name__}.encode(x {list(x.shape)})"
                raise refusal(what, got, f"{allowed}, as for zeros: sizes are a function of n alone")
            for place, part in zip(one.parts, parts, strict=True):
                place.write(payload, part)
        return payload, self.decode(payload, layout)

    def decode(self, payload: torch.Tensor, layout: Layout) -> Chunked:
        """What a payload says."""
        places: list[tuple[int, int]] = []
        pieces: list[tuple[Any, list[torch.Tensor], int]] = []
        for one in self._encodings.of(layout)[0]:
            codec = _with_draws(one.codec, one.name, self._draws)
            parts = [part.read(payload) for part in one.parts]
            if one.many > 1 or not (size := codec.chunk):
                places.append((one.start, one.stop))
                pieces.append((codec, parts, one.n))
                continue
            for start, stop in chunks(0, one.n, payload.device, multiple=size):
                first, last = start // size, -(-stop // size)
                cut = [
                    part[first * place.rows_per_chunk : last * place.rows_per_chunk] if part.dim() else part
                    for part, place in zip(parts, one.parts, strict=True)
                ]
                places.append((one.start + start, one.start + stop))
                pieces.append((codec, cut, stop - start))

        def values(number: int) -> torch.Tensor:
            codec, parts, n = pieces[number]
            return codec.decode(parts, n).view(-1)

        return Chunked(places, values)
