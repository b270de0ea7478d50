"""Dense averages, in which each step sends all elements: in fp32, fp16, bf16 and 8 bits. eden.py has fewer bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from lightning_gradcomp.compressors.base import Card, Compressor, is_large
from lightning_gradcomp.errors import check_whole
from lightning_gradcomp.registry import register


@register("none", strategy="ddp_dense")
@dataclass(kw_only=True)
class NoCompression(Compressor):
    """No compression: DDP's own overlapped fp32 all-reduce, with the same measurements."""

    card: ClassVar[Card] = Card(sends="everything, in fp32", pick="a fast link, or a baseline", source="DDP")


@register("fp16", strategy="ddp_fp16")
@dataclass(kw_only=True)
class FP16(Compressor):
    """Gradients travel and are added in fp16. Finite values that would overflow are clamped to what ranks can add.

    With a loss scale they are not clamped, because the scaler must see the overflow.
    """

    card: ClassVar[Card] = Card(
        sends="everything, in fp16", pick="as `bf16`, if bf16 is too coarse", source="torch's fp16 hook"
    )

    @property
    def wire(self) -> str:
        return "fp16"


@register("bf16", strategy="ddp_bf16")
@dataclass(kw_only=True)
class BF16(Compressor):
    """Gradients travel and are added in bfloat16, which has fp32's range and 8 bits of precision."""

    card: ClassVar[Card] = Card(
        sends="everything, in bf16",
        pick="more than 1 Gbit/s, if DDP waits for its exchange",
        source="torch's bf16 hook",
    )

    @property
    def wire(self) -> str:
        return "bf16"


@dataclass(kw_only=True)
class FewBitAverage(Compressor):
    """Base of averages in few bits: matrices travel in few bits, 1-D and small tensors in fp32 in the same messages.

    The small ones are few elements, and rounding costs them most. Sums are in fp32, and there is no residual
    (averaging/few_bits.py).

    Args:
        min_elements: tensors with fewer elements travel in fp32, as all 1-D tensors do (biases, norm weights).
    """

    min_elements: int = 1024

    def __post_init__(self) -> None:
        check_whole(f"{type(self).__name__}.min_elements", self.min_elements, 1)

    def choose(self, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        return {name for name, shape in shapes.items() if is_large(shape, self.min_elements)}


@register("int8", strategy="ddp_int8")
@dataclass(kw_only=True)
class Int8(FewBitAverage):
    """Gradients travel in 8 bits, with a scale for each 256 elements, and are added in fp32.

    On more than two ranks, each averages a part and sends the mean on, rounded once more. Rounding is stochastic, so
    its expectation is exact, and there is no residual.
    """

    card: ClassVar[Card] = Card(
        sends="everything, in 8 bits",
        pick="AdamW or another optimizer over 1 Gbit/s",
        source="CNTK's two phases, torchft's blocks",
    )

    @property
    def wire(self) -> str:
        return "int8"
