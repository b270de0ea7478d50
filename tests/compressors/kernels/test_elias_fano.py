"""Elias-Fano: indices are read back, and their length follows from n and k."""

import math

import pytest
import torch

from lightning_gradcomp.compressors.kernels.elias_fano import index_bytes, pack_indices, unpack_indices

SHAPES = [
    (1, 1),
    (2, 1),
    (2, 2),
    (7, 3),
    (8, 8),
    (9, 1),
    (1000, 1),
    (1000, 999),
    (1000, 1000),
    (1 << 16, 77),
    (1 << 16, (1 << 16) - 1),
    (65_537, 40_000),
    ((1 << 24) + 12_345, 1000),
    ((1 << 33) + 7, 5000),
]


def random_indices(n, k, seed=0):
    """k ascending, distinct indices below n; the first and the last of all among them where k allows."""
    generator = torch.Generator().manual_seed(seed)
    if n <= 1 << 17:
        drawn = torch.randperm(n, generator=generator)[:k].tolist()
    else:
        drawn = torch.randint(0, n, (k,), generator=generator).tolist()
    edges = [0, n - 1][:k]
    distinct = dict.fromkeys(edges + drawn)
    distinct.update(dict.fromkeys(range(1, k + 1)) if len(distinct) < k else {})
    return torch.tensor(sorted(list(distinct)[:k]))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_indices_are_read_back(n, k):
    for seed in range(3):
        indices = random_indices(n, k, seed)
        assert indices.numel() == k
        assert torch.equal(unpack_indices(pack_indices(indices, n), n, k), indices)


@pytest.mark.parametrize(("n", "k"), [(1000, 10), (1 << 25, 300), ((1 << 40) + 1, 300), (64, 60)])
def test_indices_crowded_at_either_end_are_read_back(n, k):
    for indices in (torch.arange(k), torch.arange(n - k, n)):
        assert torch.equal(unpack_indices(pack_indices(indices, n), n, k), indices)


def test_every_subset_of_a_small_set_has_its_own_bytes():
    seen = set()
    for subset in range(1, 256):
        indices = torch.tensor([bit for bit in range(8) if subset >> bit & 1])
        packed = pack_indices(indices, 8)
        assert torch.equal(unpack_indices(packed, 8, indices.numel()), indices)
        seen.add((indices.numel(), tuple(packed.tolist())))
    assert len(seen) == 255


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_length_is_the_formula_of_n_and_k(n, k):
    low = math.floor(math.log2(n // k))
    expected = math.ceil(k * low / 8) + math.ceil((k + n // 2**low + 1) / 8)
    assert index_bytes(n, k) == expected
    for seed in range(3):
        packed = pack_indices(random_indices(n, k, seed), n)
        assert packed.dtype == torch.uint8
        assert packed.shape == (expected,)


@pytest.mark.parametrize("density", [0.001, 0.01])
def test_an_index_costs_at_most_6_percent_above_its_entropy(density):
    n = 1 << 24
    k = round(n * density)
    p = k / n
    entropy = -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) / p
    bits = index_bytes(n, k) * 8 / k
    assert entropy < bits < 1.06 * entropy


@pytest.mark.parametrize("n", [1 << 16, 1_000_003])
def test_at_most_32_bits_an_index_and_3_bits_an_element(n):
    for k in (1 << power for power in range(4, 17)):
        assert index_bytes(n, k) <= 4 * k
        assert index_bytes(n, k) <= 3 * n / 8 + 2
