"""Indices by Elias-Fano: they are read back, and their length follows from n and k."""

import math

import pytest
import torch

from lightning_gradcomp.compressors.kernels.elias_fano import index_bytes, lengths, pack_indices, unpack_indices

SHAPES = [
    (1, 1),
    (2, 1),
    (2, 2),
    (7, 3),
    (8, 8),
    (9, 1),
    (1000, 0),
    (1000, 1),
    (1000, 999),
    (1000, 1000),
    (65_537, 40_000),
    ((1 << 24) + 12_345, 1000),
    ((1 << 33) + 7, 5000),
    (1 << 40, 3),
]


def random_indices(n, k, seed=0):
    """k ascending, distinct indices below n; the first and the last of all among them where k allows."""
    generator = torch.Generator().manual_seed(seed)
    if n <= 1 << 17:
        drawn = torch.randperm(n, generator=generator)[:k].tolist()
    else:
        drawn = torch.randint(0, n, (k,), generator=generator).tolist()
    distinct = dict.fromkeys([0, n - 1][:k] + drawn + list(range(1, k + 1)))
    return torch.tensor(sorted(list(distinct)[:k]), dtype=torch.int64)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_indices_are_read_back_wherever_they_lie(n, k):
    for indices in (random_indices(n, k), torch.arange(k), torch.arange(n - k, n)):
        packed = pack_indices(indices, n)
        assert packed.dtype == torch.uint8
        assert packed.shape == (index_bytes(n, k),)
        assert torch.equal(unpack_indices(packed, n, k), indices)


@pytest.mark.parametrize("n", [1, 5, 8, 11])
def test_every_subset_of_a_small_set_has_its_own_bytes(n):
    seen = set()
    for subset in range(1, 2**n):
        indices = torch.tensor([bit for bit in range(n) if subset >> bit & 1])
        packed = pack_indices(indices, n)
        assert torch.equal(unpack_indices(packed, n, indices.numel()), indices)
        seen.add((indices.numel(), tuple(packed.tolist())))
    assert len(seen) == 2**n - 1


def test_the_bits_are_those_of_elias_and_fano():
    """The lowest bits, the lowest of every index first, and a bitmap of the rest: the layout of any device."""
    n, indices = 20, torch.tensor([3, 4, 13, 19])
    assert lengths(n, len(indices)) == (2, 4 + 4)
    low = [1, 0, 1, 1, 1, 0, 0, 1]
    bitmap = [int(place in (0 + 0, 1 + 1, 3 + 2, 4 + 3)) for place in range(8)]
    expected = [sum(bit << place for place, bit in enumerate(bits)) for bits in (low, bitmap)]
    assert pack_indices(indices, n).tolist() == expected


def entropy(n, k):
    """Bits an index, of elements that are each sent with probability k / n."""
    p = k / n
    return -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) / p


@pytest.mark.parametrize("density", [0.001, 0.003, 0.01, 0.03])
def test_an_index_costs_about_half_a_bit_above_its_entropy(density):
    n = 1 << 24
    k = round(n * density)
    assert entropy(n, k) + 0.46 < index_bytes(n, k) * 8 / k < entropy(n, k) + 0.57
    assert index_bytes(n, k) * 8 / k < math.log2(n / k) + 2


@pytest.mark.parametrize("n", [8, 1001, 1 << 16])
def test_no_encoding_is_longer_than_a_bitmap(n):
    assert all(index_bytes(n, k) <= (n + 7) // 8 for k in range(0, n + 1, max(n // 1000, 1)))
    assert index_bytes(n, n // 2) == (n + 7) // 8
