"""Digits of any base, packed into 32-bit words at 32 / floor(32 / log2 base) bits each.

64-bit words would waste less (4.27 bits instead of 4.57 in base 17), but dividing them takes twice the time.
Neighbouring digits go to neighbouring words, not into one, so that every pass reads contiguous memory.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from lightning_gradcomp.compressors.layout import chunks

WORDS = 2**32
"""Number of values of a word."""


@cache
def per_word(base: int) -> int:
    """Digits per word: the largest k with base^k ≤ 2^32."""
    k = 1
    while base ** (k + 1) <= WORDS:
        k += 1
    return k


def packed_bytes(n: int, base: int) -> int:
    """Bytes of n digits."""
    return -(-n // per_word(base)) * 4


def pack(digits: torch.Tensor, base: int) -> torch.Tensor:
    """Pack digits (fp32 [n], whole, 0 to base - 1) into words: uint8 [packed_bytes(n, base)]."""
    pieces = chunks(0, digits.numel(), digits.device, multiple=per_word(base))
    nothing = digits.new_empty(0, dtype=torch.uint8)
    return torch.cat([nothing, *(_packed(digits[start:stop], base) for start, stop in pieces)])


def unpack(packed: torch.Tensor, base: int, out: torch.Tensor) -> None:
    """Write the digits that `pack` packed into `out` (fp32 [n])."""
    begin = 0
    for start, stop in chunks(0, out.numel(), out.device, multiple=per_word(base)):
        end = begin + packed_bytes(stop - start, base)
        own = packed[begin:end]
        if own.is_cuda:
            split(own.view(torch.int32).long() % WORDS, base, out[start:stop])
        else:
            split(own.numpy().view(np.uint32), base, out[start:stop].numpy())
        begin = end


def _packed(piece: torch.Tensor, base: int) -> torch.Tensor:
    length = packed_bytes(piece.numel(), base) // 4
    if piece.is_cuda:
        wide = torch.zeros(length, dtype=torch.long, device=piece.device)
        return combine(piece.long(), base, wide).view(torch.uint8).view(-1, 8)[:, :4].reshape(-1)
    words = combine(piece.numpy().astype(np.uint32), base, np.zeros(length, np.uint32))
    return torch.from_numpy(words.view(np.uint8))


# Both accept numpy's uint32, or torch's int64 on a GPU, since torch has no division of uint32.


def combine(digits: Any, base: int, words: Any) -> Any:
    """Combine digits (integers [n]) in place into `words` (zeros [ceil(n / per_word(base))]), and return it."""
    for place in reversed(range(per_word(base))):
        own = digits[place * len(words) : (place + 1) * len(words)]
        words *= base
        words[: len(own)] += own
    return words


def split(words: Any, base: int, out: Any) -> None:
    """Write the digits of words into `out` [n]."""
    for place in range(per_word(base)):
        own = out[place * len(words) : (place + 1) * len(words)]
        rest = words // base
        own[:] = (words - rest * base)[: len(own)]
        words = rest
