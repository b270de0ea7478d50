"""TernGrad: Wen, Xu, Yan, Wu, Wang, Chen, Li, NeurIPS 2017, arXiv 1705.07878.

Each element g becomes sign(g) · s with probability |g|/s, else 0, where s is the tensor's largest magnitude. Its
expectation is g. Gradients are first clipped at c standard deviations, since s determines the variance (§3, "gradient
clipping"). All workers share the largest s ("scaler sharing"), so that their sum is a multiple of one number. Rounding
is unbiased and needs no error feedback. Clipping is biased; `error_feedback` keeps both errors for the next step.

The authors' published code sets s = c·σ, which also clips (elements above s are always sent as s), and sends floats.
This file follows the paper, and packs five ternary digits in a byte: always 1.6 bits per element, close to log2 3 =
1.585. On real gradients, most of which round to 0, the digits' zeroth-order entropy is 0.9 to 1.05 bits.

Where workers own partitions, an owner ternarises the mean once more, with an s of its own. The paper's server sends
sums of digits instead, which are exact but take log2(2N + 1) bits per element.

A worker's draws are a function of (seed, worker, step).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

from lightning_gradcomp.compressors.base import DENSE_START, Card, Collectives
from lightning_gradcomp.compressors.decoded import Decoded
from lightning_gradcomp.compressors.kernels.rng import Uniform
from lightning_gradcomp.compressors.kernels.rows import Rows, row_of
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.tensor_codec import Encoding, ScaledLevels, TensorCodec
from lightning_gradcomp.errors import is_number, is_whole, refusal
from lightning_gradcomp.registry import register

DIGITS = 5
"""Ternary digits in a byte: 3^5 = 243."""


def scaler_of(g: torch.Tensor, c: float, rows: Rows | None = None) -> torch.Tensor:
    """The scaler s (fp32 [m]) of each row of g (fp32 [n]): its largest magnitude, but at most c standard deviations.

    c = 0 means no limit. Deviations are from 0, which the paper takes as the mean. Squares of fp32 values can overflow
    fp32, so g is first divided by its largest magnitude. Without `rows`, g is a single row.
    """
    rows = rows or row_of(len(g))
    largest = rows.largest(g)
    if c == 0:
        return largest
    unit = largest.clamp(min=torch.finfo(torch.float32).tiny)
    squares = rows.mean(lambda part, unit: (part / unit).square_(), g, unit)
    return torch.minimum(largest, c * squares.sqrt() * unit)


def clip(g: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    if g.is_cuda or bound.numel() > 1:
        return g.clamp(-bound, bound)
    limit = float(bound)  # on a CPU, clamping by Python numbers is five times as fast
    return g.clamp(-limit, limit)


def ternarise(g: torch.Tensor, s: torch.Tensor, uniform: Uniform) -> torch.Tensor:
    """1 + t (uint8), where t is -1, 0 or 1 with expectation g / s, for g (fp32) within ±s; t = 0 if s is 0.

    t = floor(g / s + u), u uniform in (0, 1): the paper's sign(g) · b with P(b = 1) = |g| / s, in one pass.
    """
    per_s = s.clamp(min=torch.finfo(torch.float32).tiny).reciprocal_()
    drawn = uniform.draw(g.numel(), 1.0).view(g.shape).addcmul_(g, per_s)
    return drawn.to(torch.uint8)


def pack(digits: torch.Tensor) -> torch.Tensor:
    """Five digits (uint8 [n], each 0, 1 or 2) in a byte, the first lowest: uint8 [ceil(n / 5)]."""
    if spare := -digits.numel() % DIGITS:
        digits = torch.nn.functional.pad(digits, (0, spare))
    digits, powers = digits.view(-1, DIGITS), _powers(digits.device)
    if digits.is_cuda:
        return (digits * powers).sum(1, dtype=torch.uint8)
    return torch.from_numpy(digits.numpy() @ powers.numpy())  # torch's sum takes three times as long


@cache
def _powers(device: torch.device) -> torch.Tensor:
    """1, 3, 9, ...: uint8 [5]."""
    return torch.tensor([3**digit for digit in range(DIGITS)], dtype=torch.uint8).to(device, non_blocking=True)


@cache
def _digit_values(device: torch.device) -> torch.Tensor:
    """What the five digits of every byte that `pack` writes stand for: -1, 0 or 1, fp32 [243, 5]."""
    powers = 3 ** torch.arange(DIGITS, device=device)
    return (torch.arange(3**DIGITS, device=device).unsqueeze(1) // powers % 3 - 1).float()


@register("terngrad")
@dataclass(kw_only=True)
class TernGrad(ScaledLevels):
    """TernGrad: -s, 0 or +s for each element, unbiased; for any optimizer.

    Source: Wen et al., NeurIPS 2017, arXiv 1705.07878.

    Args:
        clip_sigma: number of standard deviations at which each tensor's gradient is clipped; 0 turns clipping off.
        share_scaler: use the largest s of all ranks for each tensor, found in one small all-reduce a step.
        error_feedback: add the error of clipping and rounding to the next gradient.
        dense_last_layer: send the model's last matrix uncompressed, as the authors' code does by default.
        seed: seed of the random draws, from 0 to 2^32 - 1.
        warmup_steps: dense steps before the quantisation begins. `None` means 22 (the paper has none).
    """

    card: ClassVar[Card] = Card(
        sends="-s, 0 or +s for each element, drawn at random",
        pick="the paper's method; `eden` in 2 bits has less noise",
        source="[Wen et al. 2017](https://arxiv.org/abs/1705.07878)",
    )
    default_warmup_steps: ClassVar[int] = DENSE_START

    random: ClassVar[bool] = True
    chunk: ClassVar[int] = DIGITS  # type: ignore[override]
    _agreed: ClassVar[tuple[Mapping[str, int], torch.Tensor, torch.Tensor] | None] = None
    """In a step with `share_scaler`: each tensor's number, where this worker clips each, and each one's s."""
    _scalers: ClassVar[tuple[int, torch.Tensor, torch.Tensor] | None] = None
    """In `encode`: the first tensor's number, and where tensors are clipped and their s. None: they are computed."""

    clip_sigma: float = 2.5
    share_scaler: bool = True
    error_feedback: bool = False
    dense_last_layer: bool = False
    seed: int = 0  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.clip_sigma) or self.clip_sigma < 0:
            raise refusal("TernGrad.clip_sigma", self.clip_sigma, "0 (off) or a finite number above it")
        if not is_whole(self.seed) or not 0 <= self.seed < 2**32:
            raise refusal("TernGrad.seed", self.seed, "a whole number from 0 to 2^32 - 1")

    def choose(self, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        chosen = [name for name, shape in shapes.items() if self.compresses(name, shape)]
        return set(chosen[:-1] if self.dense_last_layer else chosen)

    def messages(self, layout: Layout) -> list[tuple[str, int]]:
        scalers = [("maximum", 4 * len(layout.sizes))] if self.share_scaler else []
        return [*scalers, *super().messages(layout)]

    def average(
        self, flat: torch.Tensor, layout: Layout, collectives: Collectives, state: Any
    ) -> tuple[Decoded, Decoded]:
        codec: Any = self.for_step(collectives.worker, collectives.step)
        if self.share_scaler:
            pieces = layout.pieces(flat.device)
            limits = [scaler_of(one.of(flat), self.clip_sigma, Rows.of(one.layout.sizes)) for one in pieces]
            numbers, limits = {name: number for number, name in enumerate(layout.names)}, torch.cat(limits)
            codec._agreed = numbers, limits, collectives.maximum(limits)
        return collectives.mean_of_payloads(codec, flat, layout)

    @property
    def for_means(self) -> TernGrad:
        """Returns the codec with scalers of its own: a mean of clipped gradients may exceed this worker's limits."""
        codec: Any = copy.copy(self)
        codec._agreed = None
        return codec

    def _prepared(self, one: Encoding) -> TensorCodec:
        codec: Any = super()._prepared(one)
        if self._agreed:
            numbers, *agreed = self._agreed
            codec._scalers = numbers[one.name], *agreed
        return codec

    def levels(self, device: torch.device) -> torch.Tensor:
        return _digit_values(device)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._rows or row_of(len(x))
        if self._scalers:
            first, *agreed = self._scalers
            limits, scalers = (each[first : first + rows.many] for each in agreed)
        else:
            limits = scalers = scaler_of(x, self.clip_sigma, rows)
        uniform, packed = self.draws.uniform(x.device), []
        for part, limit, s in rows.parts(x, limits, scalers, multiple=DIGITS):
            packed.append(pack(rows.pad(ternarise(clip(part, limit), s, uniform), DIGITS)))
        return scalers if self._rows else scalers.squeeze(0), packed[0] if len(packed) == 1 else torch.cat(packed)
