"""EDEN: averages of unbiased estimates in 1 to 4 bits, sent at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from lightning_gradcomp.compressors.base import Card
from lightning_gradcomp.compressors.dense import FewBitAverage
from lightning_gradcomp.errors import is_whole, refusal
from lightning_gradcomp.registry import register

NARROW = 16
"""Smallest number of elements in a row that a block of 64 in few bits is worth: a quarter of it or more."""


@register("eden")
@dataclass(kw_only=True)
class EDEN(FewBitAverage):
    """Gradients travel as unbiased estimates in 1 to 4 bits an element, overlapped with backward.

    A random rotation of blocks of 64 elements makes their distribution nearly normal, for which the quantiser is
    optimal (kernels/eden.py; Vargaftik et al., ICML 2022, arXiv 2108.08842). All ranks share a step's rotation. On more
    than two ranks, the owner of a part adds the decoded blocks before they are rotated back, and quantises the mean
    once more (as in THC, Li et al., NSDI 2024, arXiv 2302.08545), which adds noise and, in few bits, a bias. No
    residual is kept: the gradient is complete in each step, and `p.grad` is the average, with any optimizer. The noise
    is a fixed share of the squared gradient of a rank, and averaging over ranks reduces it as it reduces the noise of
    batches.

    Differences from the paper: blocks of 64 instead of whole vectors, three rounds of signs and Hadamard transform
    instead of one, bf16 scales, and on more than two ranks a second quantisation of the mean.

    Args:
        bits: bits of an element, from 1 to 4. A block's scale adds a quarter of a bit to each of its elements.
        min_elements: tensors with fewer elements travel in fp32, as do all 1-D tensors (biases, norm weights) and those
            with fewer than 16 elements in a row (3x3 depthwise convolutions).
    """

    card: ClassVar[Card] = Card(
        sends="everything, rotated, in 4 bits",
        pick="AdamW or another optimizer over less than 1 Gbit/s",
        source="Vargaftik et al. 2022",
    )

    bits: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.bits) or not 1 <= self.bits <= 4:
            raise refusal("EDEN.bits", self.bits, "1, 2, 3 or 4")

    def choose(self, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        """The parameters that travel in few bits. Shorter rows than `NARROW` are left out: a row fills whole blocks."""
        return {name for name in super().choose(shapes) if prod(shapes[name][1:]) >= NARROW}

    @property
    def wire(self) -> str:
        return f"eden{self.bits}"
