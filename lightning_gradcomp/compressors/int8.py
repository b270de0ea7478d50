"""8-bit averages: a quarter of the bytes, nearly lossless, overlapped with backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from lightning_gradcomp.compressors.base import Card, Compressor
from lightning_gradcomp.registry import register

MIN_ELEMENTS = 1024
"""Tensors with fewer elements travel in fp32, as all 1-D tensors do. They are a few thousandths of a model's elements,
and rounding costs them most."""


@register("int8", strategy="ddp_int8")
@dataclass(kw_only=True)
class Int8(Compressor):
    """Gradients travel in 8 bits, with a scale for each 256 elements, and are added in fp32.

    Each rank averages a partition and sends the mean on, rounded once more (averaging/int8.py). Rounding is to the
    nearest, without a residual. Small tensors travel in fp32 in the same messages.
    """

    card: ClassVar[Card] = Card(
        sends="everything, in 8 bits", pick="it is your first try: any optimizer, no warm-up, nothing to tune",
        source="CNTK, torchft",
    )  # fmt: skip
    wire: ClassVar[str] = "int8"

    def choose(self, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        """The parameters that travel in 8 bits."""
        return {name for name, shape in shapes.items() if len(shape) > 1 and prod(shape) >= MIN_ELEMENTS}
