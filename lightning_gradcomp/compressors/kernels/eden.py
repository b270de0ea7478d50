"""Rotated blocks of 64 numbers in 1 to 4 bits a number, with an unbiased scale for each block.

A rotation makes the entries of a block nearly normal, whatever they were. It is three rounds of random signs and a
Hadamard transform, multiplied out to one matrix. With one round, the mean of many 1-bit blocks was off by 6 % of their
norm; with three it is as exact as with a uniformly random rotation. The quantiser is the optimal one for the normal
distribution (Lloyd 1982, Max 1960). With the scale S = ‖y‖² / ⟨y, q⟩ the decoded block S·q has the same projection on y
as y itself, so that its expectation over rotations is y (DRIVE, Vargaftik et al., NeurIPS 2021, arXiv 2105.08339; EDEN,
ICML 2022, arXiv 2108.08842). Ranks that share a rotation can add decoded blocks before they rotate back (THC, NSDI
2024, arXiv 2302.08545).

The mean squared error is a constant share of ‖y‖²: 0.564, 0.128, 0.034, 0.009 for 1 to 4 bits. For long blocks it is
0.571, 0.133, 0.036, 0.010.

Levels are whole numbers, in 40ths of a block's root mean square. Rotating whole numbers back is exact in fp32, so all
ranks get the same bits whatever their processors. A block with a NaN or an infinity decodes to NaN, and so does one
that overflows in the rotation, which multiplies by 512 (values above 1e34).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from lightning_gradcomp.compressors.kernels.rng import seed_of
from lightning_gradcomp.compressors.kernels.rows import places

BLOCK = 64
"""Number of values in a block: they are rotated together and share a scale."""
ROUNDS = 3
GAIN = BLOCK**ROUNDS
"""Square of the factor by which `rotation` lengthens a block: a power of 2, so that dividing by it is exact."""
UNIT = 40
"""Levels are whole multiples of a block's root mean square divided by this."""
LEVELS = {1: (32,), 2: (18, 60), 3: (10, 30, 54, 86), 4: (5, 16, 26, 38, 50, 65, 83, 109)}
"""bits -> positive levels, in `UNIT`ths. They solve Lloyd's equations for the standard normal distribution: a level is
the mean of the interval that it represents, and intervals meet in the middle between levels. Unrounded: 0.7979; 0.4528,
1.5104; 0.2451, 0.7560, 1.3439, 2.1519; 0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326."""
CHUNK = 1 << 17
"""Number of values that a CPU handles at a time, so that intermediate results stay in its cache."""
SCALE_BYTES = 2
TINY = torch.finfo(torch.float32).tiny
EXPONENT = 0x7F800000
"""The bits of an fp32 number's exponent. Without the others, a positive number is rounded down to a power of 2."""
POWERS = 0x00800000, 0x7E800000
"""The bits of 2^-126 and 2^126."""


def eden_bytes(n: int, bits: int) -> int:
    """Bytes of n values after `pack_eden`; n is a multiple of `BLOCK`.

    >>> eden_bytes(6400, bits=2)
    1800
    """
    return SCALE_BYTES * (n // BLOCK) + n * bits // 8


@lru_cache(maxsize=16)
def rotation(device: torch.device, *key: int) -> torch.Tensor:
    """A random rotation times √GAIN, whose entries are whole numbers: fp32 [BLOCK, BLOCK], a function of its key.

    y = x @ rotation rotates the rows of x, and y @ rotation.T / GAIN rotates them back.
    """
    words = np.random.SFC64(seed_of(*key)).random_raw(ROUNDS * BLOCK // 64)
    signs = 1 - 2 * np.unpackbits(words.view(np.uint8)).astype(np.float32).reshape(ROUNDS, BLOCK)
    hadamard = np.ones((1, 1), np.float32)
    while len(hadamard) < BLOCK:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    product = np.eye(BLOCK, dtype=np.float32)
    for each in signs:
        product = product * each @ hadamard
    return torch.from_numpy(product).to(device)


@cache
def _tables(bits: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For packing, the codes of all pairs of 8-bit numbers: uint8 [2¹⁶]. For unpacking, the levels of all words.

    The first code is in the lowest bits. The number t stands for the values between t and t + 1. A word is a byte, or
    12 bits if a code has 3. Its levels, int8, are viewed as one number of 16 to 64 bits.
    """
    positive = np.array(LEVELS[bits])
    levels = np.concatenate([-positive[::-1], positive]).astype(np.int8)
    above = np.abs(np.arange(128)[:, None] + 0.5 - positive).argmin(1) + len(positive)
    codes = np.concatenate([above, len(levels) - 1 - above[::-1]])  # of 0 to 127, then of -128 to -1: uint8's order
    pairs = np.arange(1 << 16)
    of_pairs = (codes[pairs & 255] | codes[pairs >> 8] << bits).astype(np.uint8)
    length = 12 if bits == 3 else 8
    each = np.arange(1 << length)[:, None] >> np.arange(0, length, bits) & (1 << bits) - 1
    of_words = levels[each].view(f"i{length // bits}")[:, 0]
    return torch.from_numpy(of_pairs).to(device), torch.from_numpy(of_words).to(device)


def pack_eden(y: torch.Tensor, out: torch.Tensor, bits: int, seeds: torch.Tensor) -> torch.Tensor:
    """Fill `out`, uint8 [..., eden_bytes(n, bits)], with the scales and codes of rotated values. Returns it.

    Args:
        y: rotated blocks, fp32 [..., n], where rows are contiguous; n is a multiple of `BLOCK`.
        seeds: random numbers, int32 [..., n / BLOCK], for stochastic rounding of the scales to bf16.
    """
    of_pairs = _tables(bits, y.device)[0]
    for place, values, scales, codes in _chunks(y, out, bits):
        largest = values.abs().amax(-1, keepdim=True)  # vector_norm takes ten times as long on a CPU
        power = (largest.view(torch.int32) & EXPONENT).clamp_(*POWERS).view(torch.float32)
        near_1 = values / power  # exact, and its squares neither overflow nor vanish
        squares = torch.linalg.vecdot(near_1, near_1).unsqueeze(-1)
        unit = UNIT * math.sqrt(BLOCK) / squares.sqrt().clamp_(min=TINY)
        numbers = torch.mul(near_1, unit).floor_().clamp_(-128, 127).to(torch.int8)
        _join(of_pairs.index_select(0, numbers.view(torch.int16).view(-1).int() & 0xFFFF), codes, bits)
        levels = _levels(codes, bits).view(near_1.shape).float()
        products = torch.linalg.vecdot(near_1, levels).unsqueeze(-1).clamp_(min=TINY)
        nan = squares - squares  # 0 if all values are finite
        scale = (squares / products).add_(nan).mul_(power)  # 0 for a block of zeros
        scales.copy_(_to_bf16(scale, seeds[place].unsqueeze(-1)))
    return out


def add_eden(packed: torch.Tensor, total: torch.Tensor, bits: int) -> None:
    """Add the rotated values that `pack_eden` wrote to `total`, fp32 [n], contiguous."""
    for _, values, scales, codes in _chunks(total, packed, bits):
        values += _levels(codes, bits) * _from_bf16(scales)


def unpack_eden(
    packed: torch.Tensor, rotation: torch.Tensor, out: torch.Tensor, bits: int, *, add: bool = False
) -> torch.Tensor:
    """Fill `out`, fp32 [..., n], with the values that `pack_eden` wrote, rotated back. Returns it.

    Rows are contiguous, and on a GPU all of `out`. With `add`, the values are added to it.
    """
    back = rotation.T.contiguous()
    for _, values, scales, codes in _chunks(out, packed, bits):
        decoded = torch.empty_like(values) if add else values
        torch.mm(_levels(codes, bits).float(), back, out=decoded.view(-1, BLOCK))
        decoded *= _from_bf16(scales) / GAIN
        if add:
            values += decoded
    return out


def _join(pairs: torch.Tensor, out: torch.Tensor, bits: int) -> None:
    """Join the codes of pairs, uint8 [n / 2] of 2 · bits bits each, without gaps: uint8 [n · bits / 8]."""
    if bits == 4:
        out.copy_(pairs.view(out.shape))
    elif bits == 3:
        four = pairs.view(torch.int32)
        joined = four & 63 | four >> 2 & 63 << 6 | four >> 4 & 63 << 12 | four >> 6 & 63 << 18
        three = joined.view(torch.uint8).view(-1, 4)[:, :3]
        out.copy_(three.reshape(out.shape))
    elif bits == 2:
        joined = pairs.view(torch.int16).view(out.shape)
        out.copy_(joined | joined >> 4)
    else:
        joined = pairs.view(torch.int32).view(out.shape)
        out.copy_(joined | joined >> 6 | joined >> 12 | joined >> 18)


def _levels(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Levels of packed codes, uint8 [..., n · bits / 8]: int8 [blocks, BLOCK]."""
    _, of_words = _tables(bits, codes.device)
    words = codes.int().view(-1)
    if bits == 3:
        first, second, third = words.view(-1, 3).unbind(1)
        words = torch.stack([first | (second & 15) << 8, second >> 4 | third << 4], 1).view(-1)
    return of_words.index_select(0, words).view(torch.int8).view(-1, BLOCK)


def _to_bf16(x: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The upper 16 bits of x, fp32 and not negative, rounded at random so that the expectation is exact: int32."""
    return (x.view(torch.int32) + (draws & 0xFFFF)) >> 16


def _from_bf16(scales: torch.Tensor) -> torch.Tensor:
    return scales.view(torch.bfloat16).float()


def _chunks(
    y: torch.Tensor, packed: torch.Tensor, bits: int
) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Views of some blocks at a time: all of them on a GPU, some of a row on a CPU.

    Yields:
        The place of the b blocks; values [..., b, BLOCK] in `y`; scales, int16 [..., b, 1], and codes in `packed`.
    """
    n = y.size(-1)
    start = SCALE_BYTES * (n // BLOCK)
    values = y.unflatten(-1, (-1, BLOCK))
    codes = packed[..., start : start + n * bits // 8].unflatten(-1, (-1, BLOCK * bits // 8))  # without the padding
    scales = packed[..., :start].view(torch.int16).unsqueeze(-1)
    for place in places(values, CHUNK // BLOCK):
        yield place, values[place], scales[place], codes[place]
