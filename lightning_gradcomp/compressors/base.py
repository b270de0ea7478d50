"""What every compressor is: options that check themselves, which tensors it takes, how it averages them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.memory import Memory
from lightning_gradcomp.compressors.schedules import COMPRESSED, Ramp, Schedule
from lightning_gradcomp.compressors.sent import Mean, Sent, mean_of, read_all
from lightning_gradcomp.compressors.values import check_format
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.lazy import torch

if TYPE_CHECKING:
    from lightning_gradcomp.averaging.exchange import Exchange


@dataclass(frozen=True, kw_only=True)
class Card:
    """What docs/compressors.md says of a method beside what can be computed.

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


class CompressorBase:
    """No dataclass: of a class whose bases all are dataclasses, jsonargparse (LightningCLI) takes no subclasses."""

    __slots__ = ()


@dataclass(kw_only=True, slots=True)
class Compressor(CompressorBase):
    """Options that all compressors share.

    Args:
        min_elements: tensors with fewer elements travel uncompressed, as all 1-D tensors do (biases, norm weights).
        exclude: shell patterns of parameter names that travel uncompressed, e.g. `["head.*"]`.

    Raises:
        ValueError: an option out of its range.
    """

    card: ClassVar[Card] = Card()
    """The method's line in the docs."""
    owns_momentum: ClassVar[bool] = False
    """Whether momentum and weight decay of `torch.optim.SGD` are computed here, before the exchange."""

    @property
    def wire(self) -> torch.dtype:
        """What dense steps send."""
        return torch.float32

    min_elements: int = 1024
    exclude: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.min_elements < 1:
            raise refusal(f"{type(self).__name__}.min_elements", self.min_elements, "1 or more")
        if isinstance(self.exclude, str):
            raise refusal(f"{type(self).__name__}.exclude", self.exclude, "a list of patterns")

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the parameter `name` of this shape is compressed."""
        excluded = any(fnmatchcase(name, pattern) for pattern in self.exclude)
        return len(shape) > 1 and prod(shape) >= self.min_elements and not excluded

    def choose(self, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        """The names, of all parameters in the model's order, that are compressed when they train."""
        return {name for name, shape in shapes.items() if self.takes(name, shape)}

    def schedule(self) -> Schedule | None:
        """Sparsity as a function of (epoch, step), 0 in dense phases; None: always dense."""
        return None

    @property
    def clips(self) -> bool:
        """Whether `clip_local` does something."""
        return False

    def clip_local(self, gradient: torch.Tensor, world: int) -> None:
        """Clip a rank's whole gradient (flat, in place) before it is accumulated, on `world` ranks."""

    def clip_average(self, parameters: Sequence[torch.Tensor], grad_scale: float) -> None:
        """Clip the averaged gradients of a dense step, which hold the loss scale `grad_scale`."""


@dataclass(kw_only=True, slots=True)
class Lossy(Compressor, ABC):
    """A compressor that sends less than everything, and has books for the rest.

    Args:
        warmup_epochs: epochs of dense training before the compression begins.
        dense_values: how tensors that are not compressed are written beside those that are: "fp32", "bf16", "fp16" or
            "int8"; what rounding changes is remembered. Where averages travel (PowerSGD), they stay fp32.

    Raises:
        ValueError: an option out of its range.
    """

    warmup_epochs: int = 0
    dense_values: str = "fp32"

    def __post_init__(self) -> None:
        super(Lossy, self).__post_init__()
        check_format(f"{type(self).__name__}.dense_values", self.dense_values)
        if self.warmup_epochs < 0:
            raise refusal(f"{type(self).__name__}.warmup_epochs", self.warmup_epochs, "0 or more")

    @property
    def final_sparsity(self) -> float:
        """The sparsity once the warm-up is over; `COMPRESSED` where there is no such thing."""
        return COMPRESSED

    def schedule(self) -> Schedule:
        """Dense while warming up, then compressed."""
        return Ramp((), self.final_sparsity, dense=self.warmup_epochs)

    @abstractmethod
    def memory(self, layout: Layout, device: torch.device, rank: int) -> Memory:
        """Books for what is not sent of these parameters.

        Args:
            layout: the compressed parameters, in the flat buffer's order.
            device: where the books lie.
            rank: the worker's number, for what each has of its own (a random generator).
        """

    @abstractmethod
    def messages(self, layout: Layout, density: float) -> list[tuple[str, int]]:
        """What a step exchanges, in order: ("gather", "mean" or "maximum", bytes of its payload)."""

    @abstractmethod
    def average(
        self, flat: torch.Tensor, layout: Layout, density: float, exchange: Exchange, memory: Any
    ) -> tuple[Mean, Sent]:
        """The average of what all ranks sent of their `flat`, bitwise the same on each, and what this rank sent.

        Args:
            flat: what should be sent, fp32 [n]; zeros where this rank's gradient is not finite.
            density: 1 - sparsity of this step.
            exchange: its collectives; one of them has to be used, since the uncompressed gradients travel with it.
            memory: the books, to read; the caller keeps them.

        Returns:
            The mean: `Everything` (values [n]) or `Sparse` (ascending int64 indices [k], values [k]), fp32. And what
            this rank sent: one of these, or `Piecewise`.
        """


@dataclass(kw_only=True, slots=True)
class Codec(Lossy):
    """A compressor whose payload every rank can decode by itself: `memory`, `payload_bytes`, `encode`, `decode`."""

    @abstractmethod
    def payload_bytes(self, layout: Layout, density: float) -> int:
        """Length of what `encode` makes. It depends on nothing else, so it is the same on every rank."""

    @abstractmethod
    def encode(self, flat: torch.Tensor, layout: Layout, density: float) -> tuple[torch.Tensor, Sent]:
        """The payload of a flat tensor, and what it decodes to.

        Args:
            flat: what should be sent, fp32 [n], finite.
            layout: where each parameter lies in it; with owners of parts, some rows of them.
            density: 1 - sparsity of this step.

        Returns:
            uint8 [payload_bytes(layout, density)], and what `decode` makes of it.
        """

    @abstractmethod
    def decode(self, payload: torch.Tensor, layout: Layout, density: float) -> Sent:
        """What a payload (uint8 [payload_bytes(layout, density)]) says, on every rank alike."""

    def messages(self, layout: Layout, density: float) -> list[tuple[str, int]]:
        """One gather of payloads."""
        return [("gather", self.payload_bytes(layout, density))]

    def average(
        self, flat: torch.Tensor, layout: Layout, density: float, exchange: Exchange, memory: Any
    ) -> tuple[Mean, Sent]:
        """Encode, gather, decode and add in rank order."""
        with exchange.stats.phase("compress"):
            payload, sent = self.encode(flat, layout, density)
        payloads = exchange.gather(payload)
        with exchange.stats.phase("decompress"):
            everyones = read_all(payloads, exchange.ranks.worker, sent, lambda row: self.decode(row, layout, density))
            return mean_of(everyones, exchange.buffer), sent
