"""Dense averages in fp32, fp16 and bf16: the baselines for compression. int8.py and eden.py have those in few bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_gradcomp.compressors.base import Card, Compressor
from lightning_gradcomp.registry import register


@register("none", strategy="ddp_dense")
@dataclass(kw_only=True)
class NoCompression(Compressor):
    """No compression: DDP's own overlapped fp32 all-reduce, with the same measurements."""

    card: ClassVar[Card] = Card(
        sends="everything, in fp32", pick="the link is fast, or you need a baseline", source="DDP"
    )


@register("fp16", strategy="ddp_fp16")
@dataclass(kw_only=True)
class FP16(Compressor):
    """Gradients travel and are added in fp16. Finite values that would overflow are clamped to what ranks can add.

    With a loss scale they are not clamped, because the scaler must see the overflow.
    """

    card: ClassVar[Card] = Card(
        sends="everything, in fp16", pick="half the bytes are enough, bf16 is too coarse", source="torch's fp16 hook"
    )

    @property
    def wire(self) -> str:
        return "fp16"


@register("bf16", strategy="ddp_bf16")
@dataclass(kw_only=True)
class BF16(Compressor):
    """Gradients travel and are added in bfloat16, which has fp32's range and 8 bits of precision."""

    card: ClassVar[Card] = Card(
        sends="everything, in bf16", pick="half the bytes are enough", source="torch's bf16 hook"
    )

    @property
    def wire(self) -> str:
        return "bf16"
