"""The mean of what workers sent has the same bits whichever way it is computed; shards are concatenated in place."""

import pytest
import torch

from lightning_gradcomp.compressors.decoded import (
    EMPTY,
    MERGE_COST,
    Chunked,
    Dense,
    Sparse,
    by_tensor,
    concatenate,
    mean_of,
)
from lightning_gradcomp.compressors.layout import Layout
from tests.compressors.one_worker import normal


def sparse(k, n, seed):
    indices = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:k].sort().values
    return Sparse(indices, normal(k, seed))


def chunked(values, bounds):
    """Returns views of `values`, as a codec's `decode` may."""
    return Chunked(bounds, lambda number: values[slice(*bounds[number])])


def added(workers, n):
    """In the workers' order, element by element."""
    total = torch.zeros(n)
    for one in workers:
        one.add_to(total)
    return total / len(workers)


def mean(workers, n):
    return mean_of(iter(workers), len(workers), n, lambda: torch.full((n,), torch.nan))


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_few_entries_are_merged_and_many_are_added(workers, share):
    n = 100_000
    decoded = [sparse(int(share * n / MERGE_COST / workers), n, seed) for seed in range(workers)]
    whole, flat = mean(decoded, n), torch.zeros(n)
    assert isinstance(whole, Sparse if share < 1 else Dense)
    whole.add_to(flat)
    assert torch.equal(flat, added(decoded, n))
    if isinstance(whole, Sparse):
        assert bool((whole.indices.diff() > 0).all())


def test_many_entries_are_decoded_one_worker_after_another():
    flat, before = torch.zeros(10), []

    def decoded():
        for worker in range(3):
            before.append(flat.sum().item())
            yield Sparse(torch.tensor([worker]), torch.ones(1))

    mean_of(decoded(), 3, 10, lambda: flat)
    assert before == [0, 1, 2]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("kind", ["chunked", "dense", "dense and sparse"])
def test_a_mean_of_dense_values_changes_none_of_them(workers, kind):
    values = [normal(40, seed) for seed in range(workers)]
    decoded = [chunked(v, [(0, 10), (10, 11), (11, 40)]) if kind == "chunked" else Dense(v) for v in values]
    if kind == "dense and sparse":
        decoded.append(sparse(3, 40, 9))
    expected = added(decoded, 40)
    assert torch.equal(mean(decoded, 40).values, expected)
    assert torch.equal(added(decoded, 40), expected)


@pytest.mark.parametrize("make", [lambda v: Sparse(torch.arange(7), v), Dense, lambda v: chunked(v, [(0, 3), (3, 7)])])
def test_adding_subtracting_and_zeroing(make):
    values, flat = normal(7), normal(7, seed=1)
    decoded, before = make(values), flat.clone()
    decoded.add_to(flat)
    assert torch.equal(flat, before + values)
    flat = before.clone()
    decoded.subtract_from(flat)
    assert torch.equal(flat, before - values)
    decoded.zero(flat)
    assert not flat.any()


def test_a_sparse_payload_touches_its_own_entries_alone():
    decoded, flat = Sparse(torch.tensor([1, 3]), torch.tensor([5.0, 7.0])), torch.ones(5)
    decoded.add_to(flat)
    assert flat.tolist() == [1, 6, 1, 8, 1]
    decoded.zero(flat)
    assert flat.tolist() == [1, 0, 1, 0, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_values_that_are_not_finite_are_found(value):
    """Numbers whose sum overflows are finite."""
    values = torch.tensor([1.0, value, value])
    finite = abs(value) < float("inf")
    assert bool(Dense(values).finite()) == bool(Sparse(torch.arange(3), values).finite()) == finite


def test_sparse_shards_are_concatenated():
    expected, parts, starts = torch.zeros(30), [], [0, 12, 12, 20]
    for start, n in zip(starts, [12, 0, 8, 10], strict=True):
        part = sparse(3, n, start) if n else EMPTY
        part.add_to(expected[start : start + n])
        parts.append(part)
    whole, flat = concatenate(parts, starts), torch.zeros(30)
    assert isinstance(whole, Sparse)
    whole.add_to(flat)
    assert torch.equal(flat, expected)


def test_chunked_and_dense_shards_are_concatenated():
    values, flat = normal(30), torch.zeros(30)
    parts = [chunked(values[:12], [(0, 4), (4, 12)]), EMPTY, Dense(values[12:])]
    whole = concatenate(parts, [0, 12, 12])
    whole.add_to(flat)
    assert torch.equal(flat, values)
    assert torch.equal(mean([whole, whole], 30).values, values)
    whole.subtract_from(flat)
    assert not flat.any()


def test_a_chunk_of_several_tensors_is_divided_among_them():
    layout, values = Layout(tuple("abcde"), ((2, 3), (3,), (4, 1), (2,), (5,))), normal(20)
    mean = chunked(values, [(0, 9), (9, 13), (13, 20)])
    parts = [part for places, part in by_tensor(mean, layout) if places is None]
    assert [len(part) for part in parts] == layout.sizes
    assert torch.equal(torch.cat(parts), values)
