"""Base classes of compressors: which tensors are compressed, when, and how they are averaged.

Most methods extend `TensorCodec` (tensor_codec.py) and define what happens to one tensor. A method that selects
entries extends `SparseCodec`. A method that sends sums instead of payloads extends `LossyCompressor`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from lightning_gradcomp.compressors.decoded import Decoded, Sparse
from lightning_gradcomp.compressors.error_feedback import ErrorFeedback, Gradient
from lightning_gradcomp.compressors.kernels.elias_fano import index_bytes, pack_indices, unpack_indices
from lightning_gradcomp.compressors.kernels.formats import check_format, pack_values, unpack_values, value_bytes
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.payloads import Payloads
from lightning_gradcomp.compressors.schedules import Ramp, Schedule, check_sparsity
from lightning_gradcomp.compressors.updates import AdamStep, is_adam
from lightning_gradcomp.errors import check_flag, check_whole, is_number, refusal
from lightning_gradcomp.registry import entries

if TYPE_CHECKING:
    from typing import Self

DENSE_START = 22
"""Dense steps at the start of all methods but DGC. 22 is one epoch of the digits (1,437 images, 64 per step), on which
their accuracy was measured. Counting steps, not epochs, lets a run of one long epoch compress too."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """The parts of a method's row in docs/choosing.md that cannot be computed.

    Args:
        sends: what a rank sends for a compressed tensor.
        pick: where to choose it: optimizer and link.
        source: its paper or code.
    """

    sends: str = ""
    pick: str = ""
    source: str = ""


class Collectives(Protocol):
    """The collectives that `LossyCompressor.average` may use.

    `mean`, `maximum`, `gather` and `mean_of_payloads` are collective calls. The first message also carries the
    uncompressed gradients and the flags; if no message can, they travel after the last one. A message has the same
    length on all workers.
    """

    workers: int
    """Number of workers, N."""
    worker: int
    """Index of this worker."""
    step: int
    """Steps so far, the same on all workers."""

    def now(self, phase: str) -> None:
        """Counts the time from here to the next call as "compress", "exchange" or "decompress"."""
        ...

    def buffer(self) -> torch.Tensor:
        """The buffer for the mean: fp32 [n] with arbitrary content. Every call returns the same one."""
        ...

    def mean(self, flat: torch.Tensor) -> torch.Tensor:
        """The mean of `flat` (fp32 [m]) over the workers, bit-identical on all."""
        ...

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum of `values` (fp32 [m]) over the workers."""
        ...

    def gather(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """The payloads (uint8 [p]) of all workers, in worker order."""
        ...

    def mean_of_payloads(
        self, codec: Payloads, flat: torch.Tensor, layout: Layout, *, over_senders: bool = False
    ) -> tuple[Decoded, Decoded]:
        """Packs `flat`, exchanges payloads over the topology, and adds the unpacked payloads in worker order.

        With `over_senders`, an element's sum is divided by the number of workers that sent it, instead of by N.

        Returns:
            The mean, and what this worker sent.
        """
        ...


def is_large(shape: tuple[int, ...], min_elements: int) -> bool:
    """True for a tensor of this shape that is worth compressing: not 1-D, and of so many elements or more."""
    return len(shape) > 1 and prod(shape) >= min_elements


class CompressorBase:
    """Not a dataclass: jsonargparse (LightningCLI) rejects subclasses of a class whose bases are all dataclasses."""


@dataclass(kw_only=True)
class Compressor(CompressorBase):
    """How gradients are averaged. The base class sends all of them at every step, as `wire` says."""

    card: ClassVar[Card] = Card()
    """The method's row in the docs."""
    needs_optimizer: ClassVar[bool] = False
    """True if the method needs a single optimizer that `check_optimizer` accepts."""

    @property
    def wire(self) -> str:
        """The format of gradients in dense steps: "fp32", "bf16", "fp16", or one of few bits (blocks.py), in which
        the parameters that `choose` leaves out travel in fp32."""
        return "fp32"

    def choose(self, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        """The names of the parameters to compress while they train. `shapes` holds all, in the model's order."""
        return set()

    def check_names(self, names: Iterable[str]) -> None:
        """Raises ValueError if a pattern in an option matches no parameter name."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Raises ValueError if this compressor can't work with the optimizer; None if there is not exactly one."""

    def check_shards(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ValueError if this compressor can't work with `shapes`, each compressed tensor's smallest shard."""

    def schedule(self) -> Schedule | None:
        """Sparsity as a function of (epoch, step), 0 in dense phases; None if every step is dense."""
        return None

    def for_optimizer(self, optimizer: torch.optim.Optimizer | None) -> Self:
        """Returns the compressor with the defaults that depend on the optimizer filled in."""
        return self

    def state_for(self, optimizer: torch.optim.Optimizer | None) -> ErrorFeedback:
        """What error feedback accumulates with this optimizer: a new state, which has not started."""
        return ErrorFeedback()

    def clip_average(self, parameters: Sequence[torch.Tensor], grad_scale: float) -> None:
        """Clip the averaged gradients of a dense step, which are multiplied by the loss scale `grad_scale`."""


@dataclass(kw_only=True)
class LossyCompressor(Compressor, ABC):
    """The base of compressors that lose information.

    Args:
        min_elements: tensors with fewer elements travel uncompressed, as all 1-D tensors do (biases, norm weights).
        exclude: shell patterns of parameter names that travel uncompressed, e.g. `["head.*"]`.
        warmup_steps: dense steps before compression begins. Default: 22; 0 for DGC and for your own classes.
        warmup_epochs: dense epochs instead of `warmup_steps`; 0 means no warm-up.
        dense_values: format of the uncompressed tensors: "fp32", "bf16", "fp16", "int8" or "int2". The rounding error
            goes into the residual. PowerSGD exchanges averages and accepts "fp32" only.
        clip_norm: clips each rank's gradient at √N times this norm before it is accumulated (Lin et al. 2018, §3.2).
            Dense steps clip the average at this norm. None: no clipping.

    Raises:
        ValueError: if an option is out of its range, or both `warmup_steps` and `warmup_epochs` are given.
    """

    default_warmup_steps: ClassVar[int] = 0
    """The value of `warmup_steps=None`."""
    averages_over_senders: ClassVar[bool] = False
    """True if the mean of an entry is over the ranks that sent it."""
    not_partitioned_because: ClassVar[str | None] = (
        "the owner of a partition can't average it from the partition's messages alone"
    )
    """Why "two_phase" and "server" can't carry this method's messages; None if they can."""

    min_elements: int = 1024
    exclude: list[str] = field(default_factory=list)
    warmup_steps: int | None = None
    warmup_epochs: int | None = None
    dense_values: str = "fp32"
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        what = type(self).__name__
        check_whole(f"{what}.min_elements", self.min_elements, 1)
        if isinstance(self.exclude, str) or not isinstance(self.exclude, Sequence):
            raise refusal(f"{what}.exclude", self.exclude, "a list of patterns")
        if self.clip_norm is not None and not (is_number(self.clip_norm) and self.clip_norm > 0):
            raise refusal(f"{what}.clip_norm", self.clip_norm, "None or a finite number above 0")
        check_format(f"{what}.dense_values", self.dense_values)
        for flag in fields(self):
            if flag.type in (bool, "bool"):
                check_flag(f"{what}.{flag.name}", getattr(self, flag.name))
        for option in ("warmup_steps", "warmup_epochs"):
            if (length := getattr(self, option)) is not None:
                check_whole(f"{what}.{option}", length, 0)
        if self.warmup_steps is not None and self.warmup_epochs is not None:
            raise refusal(f"{what}.warmup_steps with warmup_epochs", self.warmup_steps, "None: one of the two")

    def check_names(self, names: Iterable[str]) -> None:
        """Raises ValueError if a pattern of `exclude` matches no parameter."""
        names = list(names)
        for pattern in self.exclude:
            if names and not any(fnmatchcase(name, pattern) for name in names):
                allowed = f"patterns of names of parameters, such as {names[-1]!r}"
                raise refusal(f"{type(self).__name__}.exclude", pattern, allowed)

    def compresses(self, name: str, shape: tuple[int, ...]) -> bool:
        """True if the parameter `name` of this shape is compressed."""
        excluded = any(fnmatchcase(name, pattern) for pattern in self.exclude)
        return is_large(shape, self.min_elements) and not excluded

    def choose(self, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        return {name for name, shape in shapes.items() if self.compresses(name, shape)}

    @property
    def final_sparsity(self) -> float | None:
        """The sparsity after the warm-up; None for a method without one."""
        return None

    def with_sparsity(self, sparsity: float | None) -> Self:
        """Returns the compressor for a step at this scheduled sparsity."""
        return self

    @property
    def dense_steps(self) -> int:
        """Dense steps before compression begins; 0 if the warm-up counts epochs."""
        if self.warmup_epochs is not None:
            return 0
        return self.default_warmup_steps if self.warmup_steps is None else self.warmup_steps

    def schedule(self) -> Schedule:
        """Dense during warm-up, then compressed."""
        if self.warmup_epochs is not None:
            return Ramp((), self.final_sparsity, dense=self.warmup_epochs)
        return Ramp((), self.final_sparsity, dense=self.dense_steps, by="step")

    def state_for(self, optimizer: torch.optim.Optimizer | None) -> ErrorFeedback:
        """With Adam and AdamW, their steps accumulate; with any other optimizer, gradients."""
        return AdamStep() if is_adam(optimizer) else Gradient()

    def clip_average(self, parameters: Sequence[torch.Tensor], grad_scale: float) -> None:
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm * grad_scale)

    @abstractmethod
    def messages(self, layout: Layout) -> list[tuple[str, int]]:
        """The messages of a step without partitions, in order: ("gather", "mean" or "maximum", bytes)."""

    def partition_bytes(self, partition: Layout, dense_pull: bool) -> tuple[int, int]:
        """Bytes that a worker sends to the owner of a partition, and that the owner sends to every worker.

        Each is one payload; with `dense_pull` the owner's answer is uncompressed.
        """
        length = dict(self.messages(partition))["gather"]
        return length, value_bytes(partition.n, self.dense_values) if dense_pull else length

    @abstractmethod
    def average(
        self, flat: torch.Tensor, layout: Layout, collectives: Collectives, state: Any
    ) -> tuple[Decoded, Decoded]:
        """Average what all workers send of their `flat`; the mean is bit-identical on all workers.

        Args:
            flat: the values to send, fp32 [n]; zeros where this worker's gradient is not finite.
            layout: where each parameter is in `flat`.
            collectives: exchange with the other workers.
            state: the result of `state_for`. Changes to it must not take effect before its `commit`.

        Returns:
            The mean, and what this worker sent. The mean is fp32: `Dense` (values [n]), `Sparse` (ascending int64
            indices [k], values [k]) or `Chunked` with `is_finite`.
        """


@dataclass(kw_only=True)
class Codec(LossyCompressor, Payloads):
    """A compressor that sends payloads; `payload_bytes`, `pack` and `unpack` define them."""

    not_partitioned_because: ClassVar[str | None] = None

    def for_step(self, worker: int, step: int) -> Payloads:
        """Returns the codec with the random draws, if any, of this worker's step: the same for sender and receivers."""
        return self

    def messages(self, layout: Layout) -> list[tuple[str, int]]:
        return [("gather", self.payload_bytes(layout))]

    def average(
        self, flat: torch.Tensor, layout: Layout, collectives: Collectives, state: Any
    ) -> tuple[Decoded, Decoded]:
        return collectives.mean_of_payloads(self.for_step(collectives.worker, collectives.step), flat, layout)


class SparseCodec(Codec):
    """A compressor that sends some entries of the flat buffer; `count` and `select` define which.

    A payload holds their values in the format `values`, then their indices (kernels/elias_fano.py).

    Args:
        values: format of the values sent: `"fp32"`, `"bf16"`, `"fp16"`, `"int8"` (with a scale for each 256 values)
            or `"int2"` (a sign and one of two magnitudes for each 256 values). The rounding error stays in the
            residual.
    """

    values: str
    sparsity: Any
    """Fraction of the entries that stays unsent, in [0, 1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sparsity(f"{type(self).__name__}.sparsity", self.final_sparsity)
        check_format(f"{type(self).__name__}.values", self.values)

    @property
    def final_sparsity(self) -> float:
        return self.sparsity

    def with_sparsity(self, sparsity: float | None) -> Self:
        return self if sparsity == self.sparsity else replace(self, sparsity=sparsity)

    @abstractmethod
    def count(self, layout: Layout) -> int:
        """The number k of entries to send."""

    @abstractmethod
    def select(self, flat: torch.Tensor, layout: Layout) -> torch.Tensor:
        """The indices of the entries to send: int64 [k], ascending."""

    def payload_bytes(self, layout: Layout) -> int:
        k = self.count(layout)
        return value_bytes(k, self.values) + index_bytes(layout.n, k)

    def pack(self, flat: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Sparse]:
        version = flat._version
        indices = self.select(flat, layout)
        check_unchanged(f"{type(self).__name__}.select", flat, version)
        packed = pack_values(flat[indices], self.values)
        decoded = Sparse(indices, unpack_values(packed, indices.numel(), self.values))
        return torch.cat([packed, pack_indices(indices, flat.numel())]), decoded

    def unpack(self, payload: torch.Tensor, layout: Layout) -> Sparse:
        k = self.count(layout)
        length = value_bytes(k, self.values)
        values = unpack_values(payload[:length], k, self.values)
        return Sparse(unpack_indices(payload[length:], layout.n, k), values)


def check_unchanged(what: str, x: torch.Tensor, version: int) -> None:
    """Raises ValueError if `x`, an argument of `what`, was written to since its `version`."""
    if x._version != version:
        raise refusal(
            f"the argument of {what}",
            "changed in place",
            "unchanged: the residual is what it holds, minus what is sent",
        )


def build(compressor: Compressor | str) -> Compressor:
    """A registered compressor with default options from its name or Trainer name, or the given instance."""
    if isinstance(compressor, Compressor):
        return compressor
    for entry in entries():
        if isinstance(compressor, str) and compressor in (entry.name, entry.strategy):
            return entry.cls()
    names = ", ".join(entry.name for entry in entries())
    raise refusal("compressor", compressor, f"an instance of a Compressor, or one of {names}")


def check_no_clipping(compressor: Compressor, where: str) -> None:
    """Raises ValueError if `clip_norm` is set where nothing clips by it, or it would clip the update of many steps."""
    if isinstance(compressor, LossyCompressor) and compressor.clip_norm is not None:
        allowed = "None; to clip each step, Trainer(gradient_clip_val=...), or p.grad before the step"
        raise refusal(f"{type(compressor).__name__}.clip_norm {where}", compressor.clip_norm, allowed)
