"""Random numbers are uniform, and a function of (seed, worker, step)."""

import pytest
import torch

from lightning_gradcomp.compressors.kernels.rng import Draws, Uniform, fill_uniform, row_seeds
from tests.compressors.one_worker import CPU

KEYS = [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (0, 1, 1)]
"""(seed, worker, step)."""


def uniform(*key):
    return Uniform(CPU, *key).draw(20, 0.0)


def own(*key):
    return torch.rand(20, generator=Draws(*key).own(CPU))


def rows(numbers, *key, width=256):
    return fill_uniform(torch.empty(len(numbers), width), row_seeds(numbers, *key))


def row(*key):
    return rows(torch.tensor([5]), *key)


def shared(*key, tensor="a"):
    return torch.rand(20, generator=Draws(*key).of(tensor).shared(CPU))


@pytest.mark.parametrize("begin", [0.0, 1.0])
def test_draws_are_uniform(begin):
    """Mean, variance, and the share of every sixteenth, each within five standard errors."""
    n = 100_000
    draws = Uniform(CPU, 3).draw(n, begin).double() - begin
    assert bool(((draws > 0) & (draws < 1)).all())
    assert abs(draws.mean() - 1 / 2) < 5 * (1 / 12 / n) ** 0.5
    assert abs(draws.var() - 1 / 12) < 5 * (1 / 180 / n) ** 0.5
    shares = torch.histc(draws, 16, 0, 1) / n
    assert bool(((shares - 1 / 16).abs() < 5 * (1 / 16 * 15 / 16 / n) ** 0.5).all())


def test_rounded_down_they_never_reach_the_next_number():
    """TernGrad's t = floor(g / s + u) has to be 1, and not 2, for g = s."""
    assert Uniform(CPU, 0).draw(1_000_000, 1.0).to(torch.int8).unique().tolist() == [1]


def test_they_are_the_middles_of_65536_intervals():
    draws = Uniform(CPU, 1).draw(1000, 0.0).double() * 65_536
    assert torch.equal(draws, draws.floor() + 0.5)


def test_draws_of_rows_are_uniform_and_independent():
    """Mean, variance, shares, and the correlation of all pairs in a row, each within five standard errors."""
    n, width = 20_000, 256
    draws = rows(torch.arange(n), 3, width=width).double()
    assert torch.equal(draws * 256, (draws * 256).floor() + 0.5)
    shares = torch.stack([torch.histc(column, 16, 0, 1) for column in draws.T]) / n
    assert bool(((shares - 1 / 16).abs() < 5 * (1 / 16 * 15 / 16 / n) ** 0.5).all())
    centred = (draws - 0.5) * 12**0.5
    assert float(centred.mean().abs()) < 5 / (n * width) ** 0.5
    assert bool((centred.mean(0).abs() < 5 / n**0.5).all())
    correlations = centred.T @ centred / n
    assert bool(((correlations - torch.eye(width)).abs() < 5 / n**0.5).all())
    assert abs(float((centred[1:] * centred[:-1]).mean())) < 5 / (n * width) ** 0.5


def test_a_rows_draws_do_not_depend_on_the_other_rows():
    whole, order = rows(torch.arange(9), 1, 2), torch.tensor([7, 0, 3])
    assert torch.equal(rows(order, 1, 2), whole[order])


@pytest.mark.parametrize("draw", [uniform, own, row])
def test_every_key_has_its_own_numbers_which_repeat(draw):
    drawn = [draw(*key) for key in KEYS]
    for number, (key, numbers) in enumerate(zip(KEYS, drawn, strict=True)):
        assert torch.equal(draw(*key), numbers)
        assert not any(torch.equal(numbers, other) for other in drawn[:number])


def test_a_stream_goes_on_and_so_do_a_workers_own_draws():
    stream, draws = Uniform(CPU, 5), Draws(1, 0, 0)
    assert not torch.equal(stream.draw(9, 0.0), stream.draw(9, 0.0))
    first = torch.rand(10, generator=draws.own(CPU))
    other = torch.rand(10, generator=draws.of("another tensor").own(CPU))
    assert torch.equal(torch.cat([first, other]), own(1, 0, 0))


def test_shared_draws_depend_on_seed_step_and_tensor_alone():
    expected = shared(1, 0, 0)
    assert torch.equal(shared(1, 7, 0), expected)
    for other in (shared(2, 0, 0), shared(1, 0, 1), shared(1, 0, 0, tensor="b"), own(1, 0, 0)):
        assert not torch.equal(other, expected)


def test_shared_draws_begin_anew_at_each_use():
    draws = Draws(1, 0, 0).of("a")
    torch.rand(5, generator=draws.own(CPU))
    for _ in range(2):
        assert torch.equal(torch.rand(20, generator=draws.shared(CPU)), shared(1, 0, 0))


def test_global_generators_are_not_used():
    before = torch.random.get_rng_state()
    uniform(1), own(1, 0, 0), shared(1, 0, 0)
    assert torch.equal(torch.random.get_rng_state(), before)
