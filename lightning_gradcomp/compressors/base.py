"""What a compressor is: which tensors it compresses, when, and how their average is made.

Most methods extend `TensorCodec` (tensor_codec.py), which says what happens to one tensor. One that chooses among the
elements of all tensors extends `Codec`; one that sends sums instead of payloads, `LossyCompressor`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from lightning_gradcomp.compressors.decoded import Decoded
from lightning_gradcomp.compressors.kernels.formats import check_format, value_bytes
from lightning_gradcomp.compressors.layout import Layout, Slice
from lightning_gradcomp.compressors.payloads import Payloads
from lightning_gradcomp.compressors.schedules import Ramp, Schedule
from lightning_gradcomp.compressors.updates import AdamStep, Gradient, Update, is_adam
from lightning_gradcomp.errors import is_number, is_whole, refusal

if TYPE_CHECKING:
    from typing import Self

DENSE_START = 22
"""Dense steps at the start of all methods but DGC: an epoch of the digits (1,437 images, 64 a step), on which their
accuracy was measured. Steps, not an epoch, so that a run of one long epoch compresses too."""


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


class Collectives(Protocol):
    """What `LossyCompressor.average` may exchange with the other workers.

    `mean`, `maximum`, `gather` and `mean_of_payloads` are collective calls. The uncompressed gradients and the flags
    travel with the first message, or after the last one if no message could carry them. Messages have one length on
    all workers.
    """

    workers: int
    """Their number, N."""
    worker: int
    """The number of this one."""
    step: int
    """Steps so far, the same on all workers."""

    @property
    def partitions(self) -> Partitions | None:
        """The exchange by partitions; None: every payload goes to every worker."""
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
        """The maximum over the workers of each of `values` (fp32 [m])."""
        ...

    def gather(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """The payloads (uint8 [p]) of all workers, in order."""
        ...

    def mean_of_payloads(
        self, codec: Payloads, flat: torch.Tensor, layout: Layout, *, over_senders: bool = False
    ) -> tuple[Decoded, Decoded]:
        """Packs `flat`, exchanges payloads as the topology says, unpacks and adds them in the workers' order.

        Args:
            codec: writes and reads payloads.
            flat: fp32 [n].
            layout: where each parameter is in it.
            over_senders: divide an element's sum by the number of workers that sent it, instead of by N.

        Returns:
            The mean, and what this worker sent.
        """
        ...


class Partitions(Protocol):
    """An exchange by partitions, for a method that adds up payloads without reading them. Both are collective calls."""

    slices: Sequence[Slice]
    """The partitions. Worker j owns slice j: it averages it, and sends the mean to all."""
    dense_pull: bool
    """True if means travel uncompressed (topology="server")."""

    def scatter(self, payloads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sends payload j (uint8) to worker j. Returns what all workers sent to this one, in order."""
        ...

    def gather_partitions(self, payload: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        """The payloads of all partitions, from their owners; `lengths` are their bytes. After `scatter`."""
        ...


class CompressorBase:
    """Not a dataclass: jsonargparse (LightningCLI) accepts no subclasses of a class all of whose bases are."""


@dataclass(kw_only=True)
class Compressor(CompressorBase):
    """How gradients are averaged. By itself: uncompressed, as `wire_dtype`."""

    card: ClassVar[Card] = Card()
    """The method's line in the docs."""
    needs_optimizer: ClassVar[bool] = False
    """True if it works only with one known optimizer, which `check_optimizer` accepts."""
    wire_dtype: ClassVar[torch.dtype] = torch.float32
    """In which gradients travel in dense steps."""

    def choose(self, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        """The names, of all parameters in the model's order, that are compressed when they train."""
        return set()

    def check_names(self, names: Iterable[str]) -> None:
        """Raises ValueError if an option names parameters by a pattern that matches none of all `names`."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Raises ValueError if this compressor can't work with the optimizer; None: there is no single one."""

    def check_shards(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises ValueError if this compressor can't work with each rank's shards of a sharded model.

        Args:
            shapes: of the smallest shard of every tensor that is compressed.
        """

    def schedule(self) -> Schedule | None:
        """Sparsity as a function of (epoch, step), 0 in dense phases; None: always dense."""
        return None

    def for_optimizer(self, optimizer: torch.optim.Optimizer | None) -> Self:
        """With the options whose defaults follow from the optimizer."""
        return self

    def state_for(self, optimizer: torch.optim.Optimizer | None) -> Update:
        """What error feedback accumulates with this optimizer, if it is known: a new update rule, without state."""
        return Update()

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
        ValueError: if an option is out of its range, or both `warmup_steps` and `warmup_epochs` are given.
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
        """Raises ValueError if a pattern of `exclude` matches no parameter."""
        names = list(names)
        for pattern in self.exclude:
            if names and not any(fnmatchcase(name, pattern) for name in names):
                allowed = f"patterns of names of parameters, such as {names[-1]!r}"
                raise refusal(f"{type(self).__name__}.exclude", pattern, allowed)

    def compresses(self, name: str, shape: tuple[int, ...]) -> bool:
        """True if the parameter `name` of this shape is compressed."""
        excluded = any(fnmatchcase(name, pattern) for pattern in self.exclude)
        return len(shape) > 1 and prod(shape) >= self.min_elements and not excluded

    def choose(self, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        """Those that `compresses` selects."""
        return {name for name, shape in shapes.items() if self.compresses(name, shape)}

    @property
    def final_sparsity(self) -> float | None:
        """The sparsity after the warm-up; None for a method without one."""
        return None

    def with_sparsity(self, sparsity: float | None) -> Self:
        """The compressor in a step of this scheduled sparsity."""
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

    def state_for(self, optimizer: torch.optim.Optimizer | None) -> Update:
        """Adam's and AdamW's steps; with any other optimizer, gradients."""
        return AdamStep() if is_adam(optimizer) else Gradient()

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
            state: what `state_for` made. What is written to it must not count before its `commit`.

        Returns:
            The mean: `Dense` (values [n]), `Sparse` (ascending int64 indices [k], values [k]) or `Chunked` with
            `is_finite`, fp32. And what this worker sent.
        """


@dataclass(kw_only=True)
class Codec(LossyCompressor, Payloads):
    """A compressor that sends payloads: `payload_bytes`, `pack` and `unpack` say what is in them."""

    not_partitioned_because: ClassVar[str | None] = None

    def for_step(self, worker: int, step: int) -> Payloads:
        """With the random draws, if there are any, of this worker's step. They are the same for both sides."""
        return self

    def messages(self, layout: Layout) -> list[tuple[str, int]]:
        """One gather of payloads."""
        return [("gather", self.payload_bytes(layout))]

    def average(
        self, flat: torch.Tensor, layout: Layout, collectives: Collectives, state: Any
    ) -> tuple[Decoded, Decoded]:
        """Pack, exchange, unpack and add."""
        return collectives.mean_of_payloads(self.for_step(collectives.worker, collectives.step), flat, layout)
