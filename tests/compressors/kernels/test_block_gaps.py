"""Indices as places and gaps in blocks: they are read back, and their length follows from n and k."""

import itertools
import math

import pytest
import torch

from lightning_gradcomp.compressors.kernels.block_gaps import (
    block_size,
    digit_bits,
    index_bytes,
    pack_indices,
    unpack_indices,
)
from lightning_gradcomp.compressors.kernels.formats import value_bytes
from lightning_gradcomp.compressors.kernels.topk import count

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


@pytest.mark.parametrize("n", [1, 5, 8, 11])
def test_every_subset_of_a_small_set_has_its_own_bytes(n):
    seen = set()
    for subset in range(1, 2**n):
        indices = torch.tensor([bit for bit in range(n) if subset >> bit & 1])
        packed = pack_indices(indices, n)
        assert torch.equal(unpack_indices(packed, n, indices.numel()), indices)
        seen.add((indices.numel(), tuple(packed.tolist())))
    assert len(seen) == 2**n - 1


def test_every_subset_of_a_block_is_read_back():
    """Of the second block of four: alone, and between two others."""
    n, k, size = 44, 3, 11  # blocks of a digit of 4 bits
    assert block_size(digit_bits(n, k)) == size
    seen = 0
    for subset in itertools.combinations(range(size, 2 * size), k):
        indices = torch.tensor(subset)
        seen += torch.equal(unpack_indices(pack_indices(indices, n), n, k), indices)
    for one in range(size, 2 * size):
        indices = torch.tensor([size - 1, one, 2 * size])
        seen += torch.equal(unpack_indices(pack_indices(indices, n), n, k), indices)
    assert seen == math.comb(size, k) + size


@pytest.mark.parametrize("bits", [5, 8, 17, 33])
def test_blocks_that_are_all_turned_are_read_back(bits):
    """Two indices in each block that has any, further apart than half of it."""
    k, size = 64, block_size(bits)
    n = k // 2 * 3 * size
    assert digit_bits(n, k) == bits
    starts = torch.arange(0, n, 3 * size)
    for first, second in ((0, size - 1), (0, size // 2 + 1), (size // 2 - 2, size - 1)):
        indices = torch.stack([starts + first, starts + second], 1).view(-1)
        assert torch.equal(unpack_indices(pack_indices(indices, n), n, k), indices)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_length_is_the_formula_of_n_and_k(n, k):
    bits = digit_bits(n, k)
    expected = math.ceil(k * bits / 8) + math.ceil(math.ceil(n / block_size(bits)) / 8)
    assert index_bytes(n, k) == expected <= k * (math.log2(n / k) + 1.64) / 8 + 2
    for seed in range(3):
        packed = pack_indices(random_indices(n, k, seed), n)
        assert packed.dtype == torch.uint8
        assert packed.shape == (expected,)


def entropy(n, k):
    """Bits an index, of elements that are each sent with probability k / n."""
    p = k / n
    return -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) / p


@pytest.mark.parametrize("density", [0.001, 0.003, 0.01, 0.03])
def test_an_index_costs_at_most_a_fifth_of_a_bit_above_its_entropy(density):
    n = 1 << 24
    k = round(n * density)
    assert entropy(n, k) < index_bytes(n, k) * 8 / k < entropy(n, k) + 0.2


@pytest.mark.parametrize("n", [100_000, 1_000_003, 1 << 25])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.03])
def test_a_message_in_2_bits_is_within_5_percent_of_its_entropy(density, n):
    k = count(n, density)
    bound = k * (entropy(n, k) + 2) / 8
    assert bound < value_bytes(k, "int2") + index_bytes(n, k) < 1.05 * bound


@pytest.mark.parametrize("n", [1 << 16, 1_000_003])
def test_at_most_32_bits_an_index_and_a_bit_an_element(n):
    for k in (1 << power for power in range(4, 17)):
        assert index_bytes(n, k) <= 4 * k
        assert index_bytes(n, k) <= n / 8 + 2
