"""Who owns which stretch of the gradients, and how long messages to and from owners are, whatever is in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from lightning_gradcomp.averaging.message import Frame
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.relay import Relay
from lightning_gradcomp.compressors.layout import Layout, Stretch
from lightning_gradcomp.compressors.sent import Mean, Sent


class Ownership(ABC):
    """Owners who remember nothing.

    Args:
        layout: all that is compressed.
        dense: number of elements that travel uncompressed; owners send their means in fp32.
        dense_values: how those are written on their way to owners.
        ranks: the workers, who are the owners too.
    """

    kept: tuple[str, ...] = ()
    """Names of the buffers that hold what owners remember, as a `Memory` has them."""

    def __init__(self, layout: Layout, dense: int, dense_values: str, ranks: Ranks) -> None:
        self.layout, self.ranks, self._values = layout, ranks, dense_values
        self.stretches: list[Stretch] = layout.stretches(ranks.workers)
        self.own = self.stretches[ranks.worker]
        whole, more = divmod(dense, ranks.workers)
        self.dense = [whole + (worker < more) for worker in range(ranks.workers)]
        self._frames: dict[tuple[float, int], tuple[list[Frame], list[Frame]]] = {}

    @abstractmethod
    def push_bytes(self, stretch: Stretch, density: float) -> int:
        """Length of what a rank sends to the owner of this stretch."""

    @abstractmethod
    def pull_bytes(self, stretch: Stretch, density: float) -> int:
        """Length of what the owner of this stretch sends to every rank."""

    @abstractmethod
    def average(self, flat: torch.Tensor, density: float, relay: Relay, memory: Any) -> tuple[Mean, Sent]:
        """The average that owners send of everybody's `flat` (fp32 [n]), and what this rank sent of its own.

        Args:
            memory: this rank's books, to read.
        """

    def frames(self, density: float, flags: int) -> tuple[list[Frame], list[Frame]]:
        """Messages to each owner, and those that owners send back."""
        key = density, flags
        if key not in self._frames:
            both = list(zip(self.dense, self.stretches, strict=True))
            to_owners = [Frame(d, self._values, self.push_bytes(s, density), flags) for d, s in both]
            back = [Frame(d, "fp32", self.pull_bytes(s, density), flags) for d, s in both]
            self._frames = {key: (to_owners, back)}  # a schedule seldom goes back
        return self._frames[key]

    def traffic(self, density: float, flags: int) -> int:
        """Bytes that the rank which sends the most sends in a step."""
        to_owners, back = ([frame.length for frame in frames] for frames in self.frames(density, flags))
        fewest = to_owners.index(min(to_owners))
        return self.ranks.scatter_traffic(to_owners, fewest) + self.ranks.gather_traffic(max(back))

    def commit(self) -> None:  # noqa: B027, that there is nothing to do is an answer
        """Make the step count."""

    def clear(self) -> None:  # noqa: B027
        """Forget everything, once it has been handed back."""
