"""What every compressor is: options that check themselves, which tensors it takes, how it averages them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.schedules import Schedule
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.lazy import torch

if TYPE_CHECKING:
    from lightning_gradcomp.averaging.exchange import Exchange


@dataclass(kw_only=True, slots=True)
class Compressor:
    """Options that all compressors share.

    Args:
        min_elements: tensors with fewer elements travel uncompressed, as all 1-D tensors do (biases, norm weights).
        exclude: shell patterns of parameter names that travel uncompressed, e.g. `["head.*"]`.
    """

    owns_momentum: ClassVar[bool] = False
    """Whether momentum and weight decay of `torch.optim.SGD` are computed here, before the exchange."""

    min_elements: int = 1024
    exclude: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.min_elements < 1:
            raise refusal(f"{type(self).__name__}.min_elements", self.min_elements, "1 or more")

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the parameter `name` of this shape is compressed."""
        excluded = any(fnmatchcase(name, pattern) for pattern in self.exclude)
        return len(shape) > 1 and prod(shape) >= self.min_elements and not excluded

    def schedule(self) -> Schedule | None:
        """Sparsity as a function of (epoch, step), 0 in dense phases; None: always dense."""
        return None

    def clip_local(self, gradient: torch.Tensor, world: int) -> None:
        """Clip a rank's whole gradient (flat, in place) before it is accumulated, on `world` ranks."""

    def clip_average(self, parameters: Sequence[torch.Tensor], grad_scale: float) -> None:
        """Clip the averaged gradients of a dense step, which hold the loss scale `grad_scale`."""


@dataclass(kw_only=True, slots=True)
class Codec(Compressor):
    """A compressor whose payload every rank can decode by itself.

    A subclass is a dataclass with `encode`, `decode`, `payload_bytes` and `memory`.
    """

    def memory(self, layout: Layout, device: torch.device) -> Any:
        """Books for what is not sent of these parameters."""
        raise TypeError(f"{type(self).__name__} has no memory()")

    @property
    def final_sparsity(self) -> float:
        """The sparsity once every warm-up is over."""
        raise TypeError(f"{type(self).__name__} has no final_sparsity")

    def payload_bytes(self, layout: Layout, density: float) -> int:
        """Length of what `encode` makes. It depends on nothing else, so it is the same on every rank."""
        raise TypeError(f"{type(self).__name__} has no payload_bytes()")

    def encode(self, flat: torch.Tensor, layout: Layout, density: float) -> tuple[torch.Tensor, Any]:
        """The payload (uint8) of a flat fp32 tensor, and what it decodes to."""
        raise TypeError(f"{type(self).__name__} has no encode()")

    def decode(self, payload: torch.Tensor, layout: Layout, density: float) -> Any:
        """What a payload says: an object with `add_to(flat)`."""
        raise TypeError(f"{type(self).__name__} has no decode()")

    def average(
        self, flat: torch.Tensor, layout: Layout, density: float, exchange: Exchange
    ) -> tuple[torch.Tensor, Any]:
        """The average of what all ranks sent of their `flat`, bitwise the same on each, and what this one sent."""
        with exchange.stats.phase("compress"):
            payload, sent = self.encode(flat, layout, density)
        payloads = exchange.gather(payload)
        with exchange.stats.phase("decompress"):
            mean = torch.zeros_like(flat)
            for payload in payloads:
                self.decode(payload, layout, density).add_to(mean)
            return mean.div_(len(payloads)), sent
