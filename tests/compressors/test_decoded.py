"""The mean of what ranks sent is the same, to the bit, whichever way it is made."""

import pytest
import torch

from lightning_gradcomp.compressors.decoded import MERGING, NOTHING, Everything, Piecewise, Sparse, joined, mean_of
from tests.compressors.books import normal


def sparse(k, n, seed):
    indices = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:k].sort().values
    return Sparse(indices, normal(k, seed))


def added(everyones, n):
    """In rank order, element by element."""
    total = torch.zeros(n)
    for one in everyones:
        one.add_to(total)
    return total / len(everyones)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_few_entries_are_merged_and_many_are_added_up(ranks, share):
    n = 100_000
    everyones = [sparse(int(share * n / MERGING / ranks), n, seed) for seed in range(ranks)]
    mean = mean_of(everyones, torch.full((n,), torch.nan))
    assert isinstance(mean, Sparse if share < 1 else Everything)
    flat = torch.zeros(n)
    mean.add_to(flat)
    assert torch.equal(flat, added(everyones, n))
    if isinstance(mean, Sparse):
        assert bool((mean.indices.diff() > 0).all())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_pieces_are_added_one_by_one(ranks):
    pieces = [(0, 10), (10, 11), (11, 40)]
    everyones = []
    for seed in range(ranks):
        values = normal(40, seed)
        everyones.append(Piecewise(pieces, lambda number, v=values: v[slice(*pieces[number])].clone()))
    mean = mean_of(everyones, torch.full((40,), torch.nan))
    assert torch.equal(mean.values, added(everyones, 40))


def test_stretches_are_joined_where_they_begin():
    expected, parts, starts = torch.zeros(30), [], [0, 12, 12, 20]
    for start, n in zip(starts, [12, 0, 8, 10], strict=True):
        part = sparse(3, n, start) if n else NOTHING
        part.add_to(expected[start : start + n])
        parts.append(part)
    whole = torch.zeros(30)
    joined(parts, starts).add_to(whole)
    assert torch.equal(whole, expected)


def test_stretches_in_pieces_are_joined_too():
    values = normal(30)
    first = Piecewise([(0, 4), (4, 12)], lambda number: values[:4] if number == 0 else values[4:12])
    whole = torch.zeros(30)
    joined([first, NOTHING, Everything(values[12:])], [0, 12, 12]).add_to(whole)
    assert torch.equal(whole, values)
    joined([first, NOTHING, Everything(values[12:])], [0, 12, 12]).take_from(whole)
    assert not whole.any()
