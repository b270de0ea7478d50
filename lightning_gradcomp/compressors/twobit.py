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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

from lightning_gradcomp.compressors.base import DENSE_START, Card
from lightning_gradcomp.compressors.kernels.bits import greater_equal, interleave, look_up
from lightning_gradcomp.compressors.layout import chunks
from lightning_gradcomp.compressors.tensor_codec import TensorCodec
from lightning_gradcomp.errors import is_number, refusal
from lightning_gradcomp.registry import register

PER_WORD = 16
"""Codes in four bytes; MXNet pads each tensor to a multiple of four bytes."""


def best_threshold(r: torch.Tensor) -> torch.Tensor:
    """The t that leaves the smallest residual of r (fp32 [..., n]): Σr² / (√2 · Σ|r|), fp32 [...].

    The part of E[r²] that is sent is ∫ (2t|r| - t²) over |r| ≥ t. For a Laplace distribution of scale b it is largest
    at t = √2 · b, and Σr² / Σ|r| is 2b. For a normal distribution the formula is within 1 % of the best t. Elements
    that are 0 don't change t. They would pull a mean magnitude towards 0. Since an element above t falls by only t per
    step, most of r would then stay for dozens of steps.
    """
    n = r.shape[-1]
    pieces = [r[..., start:stop] for start, stop in chunks(0, n, r.device)]
    tiny = torch.finfo(torch.float32).tiny  # zeros have no such t; at t = 0 every element would send ±0
    mean = torch.clamp(torch.stack([piece.abs().sum(-1) for piece in pieces]).sum(0) / n, min=tiny)
    # Divided by their mean first: gradients of 1e-20 or 1e20 would be squared to 0 or infinity.
    unit = mean.unsqueeze(-1)
    squares = torch.stack([(piece / unit).square_().sum(-1) for piece in pieces]).sum(0)
    return torch.clamp(0.5**0.5 * mean * (squares / n), min=tiny)


def pack(r: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The codes of r (fp32 [n]) at threshold t (fp32 scalar), in MXNet's order: uint8 [4 · ceil(n / 16)].

    With r [m, n] and t [m], where n is a multiple of 16, rows follow one another.
    """
    t = t.unsqueeze(-1) if t.dim() else t
    codes = interleave(greater_equal(r.abs(), t).view(-1), greater_equal(r, t).view(-1))  # 11, 10 or 00
    return torch.nn.functional.pad(codes, (0, -(-r.numel() // PER_WORD) * 4 - codes.numel()))


@cache
def _levels(device: torch.device) -> torch.Tensor:
    """The values of the four codes of every byte: -1, 0 or 1, fp32 [256, 4]."""
    codes = (torch.arange(256, device=device).unsqueeze(1) >> torch.arange(6, -1, -2, device=device)) & 3
    return torch.tensor([0.0, 0.0, -1.0, 1.0], dtype=torch.float32).to(device, non_blocking=True)[codes]


def unpack(packed: torch.Tensor, n: int, t: torch.Tensor) -> torch.Tensor:
    """The values that `pack` wrote at threshold t: each -t, 0 or +t, fp32 [n]; or [m, n] at thresholds [m]."""
    if t.dim():
        return look_up(_levels(packed.device), packed.view(-1)).view(-1, n).mul_(t.unsqueeze(1))
    return look_up(_levels(packed.device) * t, packed)[:n]


@register("twobit")
@dataclass(kw_only=True)
class TwoBit(TensorCodec):
    """2-bit threshold quantisation with residual (MXNet); for any optimizer.

    Source: MXNet, src/kvstore/gradient_compression.

    Args:
        threshold: t. `"auto"` uses, for each tensor at each step, the t that leaves the smallest residual. A number
            is a fixed t in units of the gradient, as in MXNet. MXNet's default of 0.5 suits gradients summed over a
            batch, not PyTorch's means.
        error_feedback: add the quantisation error of a step to the next gradient.
        warmup_steps: dense steps before the quantisation begins. `None` means 22 (MXNet has none, and loses accuracy).

    Raises:
        ValueError: if an option is out of its range.
    """

    card: ClassVar[Card] = Card(
        sends="-t, 0 or +t for each element",
        remembers="a residual",
        pick="you want MXNet's rule; otherwise 1-bit sends half as much",
        source="[MXNet's kvstore](https://mxnet.apache.org/api/faq/gradient_compression)",
    )
    default_warmup_steps: ClassVar[int] = DENSE_START

    batched: ClassVar[bool] = True

    threshold: Any = "auto"  # "auto" or a number; the command line's types have no union of the two

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold != "auto" and not (is_number(self.threshold) and self.threshold > 0):
            raise refusal("TwoBit.threshold", self.threshold, "'auto' or a number above 0")

    @property
    def chunk(self) -> int:
        """Codes per word."""
        return PER_WORD

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The threshold, and the codes."""
        auto = self.threshold == "auto"
        t = best_threshold(x) if auto else x.new_full(x.shape[:-1], float(self.threshold))
        if x.dim() > 1:
            return t, pack(x, t).view(len(x), -1)
        return t, torch.cat([pack(x[a:b], t) for a, b in chunks(0, len(x), x.device, multiple=PER_WORD)])

    def decode(self, parts: Sequence[torch.Tensor], n: int) -> torch.Tensor:
        """-t, 0 or +t for each element."""
        t, packed = parts
        return unpack(packed, n, t)
