"""The dense exchange that compression is measured against."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gradcomp.compressors.base import Compressor
from lightning_gradcomp.registry import register


@register("none", strategy="ddp_dense")
@dataclass(kw_only=True, slots=True)
class NoCompression(Compressor):
    """No compression: DDP's own overlapped fp32 all-reduce, measured like the rest."""

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Nothing is compressed."""
        return False
