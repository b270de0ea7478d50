"""Digits of any base in 32-bit words, as many as fit."""

from math import log2

import numpy as np
import pytest
import torch

from lightning_gradcomp.compressors.kernels.radix import combine, pack, packed_bytes, per_word, split, unpack
from lightning_gradcomp.compressors.layout import CHUNK
from tests.averaging.workers import seeded

BASES = [2 * workers + 1 for workers in (1, 2, 3, 4, 5, 8, 16, 64, 127, 128, 1024, 40_000)]


def digits_of(n, base):
    """fp32 [n]. The first half are the largest digit, so that some words are full."""
    digits = torch.randint(0, base, (n,), generator=seeded(n, base)).float()
    digits[: n // 2] = base - 1
    return digits


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("n", [0, 1, 2, 12, 13, 14, 26, 1211])
def test_digits_are_read_back(n, base):
    digits, out = digits_of(n, base), torch.full((n,), torch.nan)
    packed = pack(digits, base)
    assert packed.dtype == torch.uint8
    assert packed.numel() == packed_bytes(n, base)
    unpack(packed, base, out)
    assert torch.equal(out, digits)


@pytest.mark.parametrize("base", [5, 17])
def test_the_length_does_not_depend_on_chunks(base):
    n = 2 * CHUNK + 5
    digits, out = digits_of(n, base), torch.empty(n)
    packed = pack(digits, base)
    assert packed.numel() == packed_bytes(n, base)
    unpack(packed, base, out)
    assert torch.equal(out, digits)


@pytest.mark.parametrize("base", BASES)
def test_a_word_is_full(base):
    assert per_word(base) == int(32 / log2(base))
    assert base ** per_word(base) <= 2**32 < base ** (per_word(base) + 1)


def test_bits_an_element():
    ten_thousand = {base: 8 * packed_bytes(10_000, base) / 10_000 for base in (5, 9, 17, 129)}
    assert ten_thousand == pytest.approx({5: 2.46, 9: 3.2, 17: 4.57, 129: 8.0}, abs=0.005)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("n", [1, 13, 100])
def test_a_gpus_words_are_those_of_a_cpu(n, base):
    """64 bits wide, with nothing in the upper half."""
    digits, length = digits_of(n, base), packed_bytes(n, base) // 4
    words = combine(digits.long(), base, torch.zeros(length, dtype=torch.long))
    assert words.tolist() == pack(digits, base).numpy().view(np.uint32).tolist()
    out = torch.empty(n)
    split(words, base, out)
    assert torch.equal(out, digits)
