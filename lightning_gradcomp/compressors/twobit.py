"""2-bit quantisation with threshold and residual, as in MXNet's kvstore (src/kvstore/gradient_compression).

For each element, let r be the residual plus the gradient. r ≥ t sends code 11 and subtracts t from r. r ≤ -t sends 10
and adds t. Anything between sends 00. The order of bits is MXNet's: four elements per byte, the first in the top two
bits, each tensor padded to four bytes.

MXNet's t = 0.5 suits gradients summed over the batch. PyTorch's losses are means over the batch, so gradients are
smaller by the batch size and 0.5 would send nothing for hundreds of steps. `threshold="auto"` uses `best_threshold` of
each tensor at each step, and sends that t too. A code always has 2 bits. On real gradients its zeroth-order entropy is
0.6 to 1.0 bits, which an entropy coder could approach.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

from lightning_gradcomp.compressors.base import DENSE_START, Card
from lightning_gradcomp.compressors.kernels.bits import greater_equal, interleave
from lightning_gradcomp.compressors.kernels.rows import Rows, row_of
from lightning_gradcomp.compressors.tensor_codec import ScaledLevels
from lightning_gradcomp.errors import is_number, refusal
from lightning_gradcomp.registry import register

PER_WORD = 16
"""Codes in four bytes; MXNet pads each tensor to a multiple of four bytes."""


def best_threshold(r: torch.Tensor, rows: Rows | None = None) -> torch.Tensor:
    """The t that leaves the smallest residual of each row of r (fp32 [n]): Σr² / (√2 · Σ|r|), fp32 [m].

    Without `rows`, r is a single row.

    The part of E[r²] that is sent is ∫ (2t|r| - t²) over |r| ≥ t. For a Laplace distribution of scale b it is largest
    at t = √2 · b, and Σr² / Σ|r| is 2b. For a normal distribution the formula is within 1 % of the best t. Elements
    that are 0 don't change t. They would pull a mean magnitude towards 0. Since an element above t falls by only t per
    step, most of r would then stay for dozens of steps.
    """
    rows = rows or row_of(len(r))
    tiny = torch.finfo(torch.float32).tiny  # zeros have no such t; at t = 0 every element would send ±0
    mean = torch.clamp(rows.mean(torch.abs, r), min=tiny)
    # Divided by their mean first: gradients of 1e-20 or 1e20 would be squared to 0 or infinity.
    squares = rows.mean(lambda part, unit: (part / unit).square_(), r, mean)
    return torch.clamp(0.5**0.5 * mean * squares, min=tiny)


def pack(r: torch.Tensor, t: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The codes of r (fp32 [n]) at each row's threshold t (fp32 [m]), in MXNet's order, four to a byte: uint8.

    Each row ends at a multiple of four bytes.
    """
    packed = []
    for part, bound in rows.parts(r, t, multiple=PER_WORD):
        bits = greater_equal(part.abs(), bound), greater_equal(part, bound)
        packed.append(interleave(*(rows.pad(each, PER_WORD) for each in bits)))  # 11, 10 or 00
    return packed[0] if len(packed) == 1 else torch.cat(packed)


@cache
def _code_values(device: torch.device) -> torch.Tensor:
    """The values of the four codes of every byte: -1, 0 or 1, fp32 [256, 4]."""
    codes = (torch.arange(256, device=device).unsqueeze(1) >> torch.arange(6, -1, -2, device=device)) & 3
    return torch.tensor([0.0, 0.0, -1.0, 1.0], dtype=torch.float32).to(device, non_blocking=True)[codes]


@register("twobit")
@dataclass(kw_only=True)
class TwoBit(ScaledLevels):
    """2-bit threshold quantisation with residual (MXNet); for any optimizer.

    Source: MXNet, src/kvstore/gradient_compression.

    Args:
        threshold: t. `"auto"` uses, for each tensor at each step, the t that leaves the smallest residual. A number
            is a fixed t in units of the gradient, as in MXNet. MXNet's default of 0.5 suits gradients summed over a
            batch, not PyTorch's means.
        error_feedback: add the quantisation error of a step to the next gradient.
        warmup_steps: dense steps before the quantisation begins. `None` means 22 (MXNet has none, and loses accuracy).
    """

    card: ClassVar[Card] = Card(
        sends="-t, 0 or +t for each element",
        pick="MXNet's rule; otherwise `onebit` sends half as much",
        source="[MXNet's kvstore](https://mxnet.apache.org/api/faq/gradient_compression)",
    )
    default_warmup_steps: ClassVar[int] = DENSE_START

    chunk: ClassVar[int] = PER_WORD  # type: ignore[override]

    threshold: Any = "auto"  # "auto" or a number; the command line's types have no union of the two

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold != "auto" and not (is_number(self.threshold) and self.threshold > 0):
            raise refusal("TwoBit.threshold", self.threshold, "'auto' or a number above 0")

    def levels(self, device: torch.device) -> torch.Tensor:
        return _code_values(device)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._rows or row_of(len(x))
        t = best_threshold(x, rows) if self.threshold == "auto" else x.new_full((rows.many,), float(self.threshold))
        return (t if self._rows else t.squeeze(0)), pack(x, t, rows)
