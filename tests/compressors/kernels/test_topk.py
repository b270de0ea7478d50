"""Top-k returns exactly the k largest, by a sampled search and by an exact one."""

from itertools import accumulate

import numpy as np
import pytest
import torch

from lightning_gradcomp.compressors.gradient_dropping import GradientDropping
from lightning_gradcomp.compressors.kernels.rows import Rows
from lightning_gradcomp.compressors.kernels.topk import (
    SAMPLE_AT_LEAST,
    count,
    count_each,
    exact,
    sampled,
    topk,
    topk_each,
)
from lightning_gradcomp.compressors.layout import Layout

LONG = SAMPLE_AT_LEAST + 4321
"""Long enough that the search is sampled."""
STRIDE = 401
"""Of the sample."""


def tensors(n):
    """Kinds of tensors for which a sampled threshold is wrong."""
    generator = torch.Generator().manual_seed(n)
    normal = torch.randn(n, generator=generator)
    spike = torch.zeros(n)
    spike[n // 2] = -3
    half = normal.clone()
    half[: n // 2] = 0
    return {
        "normal": normal,
        "heavy tail": normal.sign() * normal.abs().mul(4).exp(),
        "sorted": normal.sort().values,
        "one block large": torch.where(torch.arange(n) < n // 50, normal * 1000, normal),
        "period of the sampling stride": torch.where(torch.arange(n) % STRIDE == 0, normal * 1000, normal),
        "all negative": -normal.abs(),
        "few levels": (normal * 3).round(),
        "half zeros": half,
        "one spike": spike,
        "constant": torch.full((n,), -0.5),
        "zeros": torch.zeros(n),
        "subnormal": normal * 1e-42,
    }


@pytest.mark.parametrize("kind", tensors(8))
@pytest.mark.parametrize("n", [1, 2, 1000, LONG])
def test_k_distinct_indices_with_the_values_of_torchs_topk(kind, n):
    x = tensors(max(n, 2))[kind][:n]
    for k in sorted({1, min(2, n), -(-n // 1000), -(-n // 100), -(-n // 3), n}):
        chosen = topk(x, k)
        assert chosen.dtype == torch.int64
        assert chosen.shape == (k,)
        assert bool((chosen[1:] > chosen[:-1]).all())
        assert torch.equal(x[chosen].abs().sort().values, x.abs().topk(k).values.sort().values)


@pytest.mark.parametrize("kind", tensors(8))
@pytest.mark.parametrize("n", [3000, LONG])
def test_a_sampled_search_finds_what_an_exact_one_finds(kind, n):
    x = tensors(n)[kind].numpy()
    for k in (1, n // 1000, n // 100, n // 10, STRIDE):  # at k = STRIDE the sample has large entries alone
        np.testing.assert_array_equal(sampled(x, k), exact(np.abs(x), k))


@pytest.mark.parametrize("n", [1000, LONG])
def test_ties_are_taken_at_even_distances(n):
    k = n // 10
    gaps = topk(torch.ones(n), k).diff()
    assert int(gaps.max() - gaps.min()) <= 1
    assert int(topk(torch.ones(n), k).max()) >= n - 20


def test_ties_fill_up_evenly_after_larger_entries():
    x = torch.ones(1000)
    x[:50] = 2
    chosen = topk(x, 100)
    assert torch.equal(chosen[:50], torch.arange(50))
    rest = chosen[50:].diff()
    assert int(rest.min()) == int(rest.max()) == 19


@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 1.0])
def test_each_tensor_is_searched_alone(density):
    """Small tensors of one size at once, with what `topk` finds in each; ties, as in tensors of zeros, included."""
    kinds = tensors(1000)
    sizes = [1000] * len(kinds) + [7, 7, 1, LONG, LONG, 3]
    flat = torch.cat([*kinds.values(), *(tensors(max(size, 2))["normal"][:size] for size in sizes[len(kinds) :])])
    stops = list(accumulate(sizes))
    expected = [topk(flat[b - n : b], count(n, density)) + b - n for n, b in zip(sizes, stops, strict=True)]
    assert torch.equal(topk_each(flat, Rows.of(sizes), density), torch.cat(expected))
    assert count_each(Rows.of(sizes), density) == len(torch.cat(expected))


@pytest.mark.parametrize("density", [0.01, 0.3])
def test_each_chunk_of_a_tensor_is_searched_alone(density):
    layout = Layout(("a", "b", "c", "d", "e"), ((4096,), (8192,), (5000,), (904,), (10,)))
    flat = torch.randn(layout.n, generator=torch.Generator().manual_seed(0))
    places = [(a, min(a + 4096, stop)) for start, stop in layout.bounds for a in range(start, stop, 4096)]
    expected = [topk(flat[a:b], count(b - a, density)) + a for a, b in places]
    dropping = GradientDropping(sparsity=1 - density, scope="chunk")
    assert torch.equal(dropping.select(flat, layout), torch.cat(expected))
    assert dropping.count(layout) == len(torch.cat(expected))


def test_a_view_of_a_larger_buffer_is_searched_alone():
    buffer = torch.arange(100.0)
    assert topk(buffer[10:20], 3).tolist() == [7, 8, 9]


def test_topk_does_not_change_its_input():
    x = tensors(LONG)["normal"]
    before = x.clone()
    topk(x, 100)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("n", "density", "k"),
    [
        (1, 0.001, 1),
        (5, 0.001, 1),
        (1000, 1 - 0.999, 1),
        (1001, 0.001, 2),
        (2_359_296, 1 - 0.999, 2360),
        (64, 0.25, 16),
        (65, 0.25, 17),
        (10, 1.0, 10),
        (3, 0.9999, 3),
    ],
)
def test_k_is_the_density_rounded_up(n, density, k):
    assert count(n, density) == k


def test_k_is_from_1_to_n_and_grows_with_the_density():
    for n in (1, 7, 1000, 123_457):
        counts = [count(n, 1 - sparsity) for sparsity in (0.9999, 0.999, 0.99, 0.9, 0.5, 0.25, 0.0)]
        assert counts == sorted(counts)
        assert counts[0] >= 1
        assert counts[-1] == n
