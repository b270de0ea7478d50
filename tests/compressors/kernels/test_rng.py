"""A rank's own random numbers: uniform, and the same again from the same state."""

import pytest
import torch

from lightning_gradcomp.compressors.kernels.rng import DeviceGenerator, HostGenerator

MAKES = {"host": HostGenerator, "device": lambda seed: DeviceGenerator(seed, torch.device("cpu"))}
every = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


@every
@pytest.mark.parametrize("begin", [0.0, 1.0])
def test_they_are_uniform(make, begin):
    """Mean, variance, and the share of every sixteenth, each within five standard errors."""
    n = 100_000
    draws = make(3).uniform(n, begin).double() - begin
    assert bool(((draws >= 0) & (draws < 1)).all())
    assert abs(draws.mean() - 1 / 2) < 5 * (1 / 12 / n) ** 0.5
    assert abs(draws.var() - 1 / 12) < 5 * (1 / 180 / n) ** 0.5
    shares = torch.histc(draws, 16, 0, 1) / n
    assert bool(((shares - 1 / 16).abs() < 5 * (1 / 16 * 15 / 16 / n) ** 0.5).all())


@every
def test_rounded_down_they_never_reach_the_next_number(make):
    """t = floor(g / s + u) of TernGrad is to be 1, and not 2, for g = s."""
    assert make(0).uniform(1_000_000, 1.0).to(torch.int8).unique().tolist() == [1]


def test_on_the_host_they_are_the_middles_of_65536_steps():
    draws = HostGenerator(1).uniform(1000, 0.0).double() * 65_536
    assert torch.equal(draws, draws.floor() + 0.5)


@every
def test_a_state_that_is_set_gives_the_same_numbers_again(make):
    generator, other = make(5), make(6)
    generator.uniform(7, 0.0)
    state = generator.get_state()
    following = generator.uniform(9, 0.0)
    assert state.dtype == torch.uint8
    assert not torch.equal(other.uniform(9, 0.0), following)
    for again in (generator, other):
        again.set_state(state)
        assert torch.equal(again.uniform(9, 0.0), following)
    assert not torch.equal(generator.uniform(9, 0.0), following)


@every
def test_seeds_differ_and_repeat(make):
    assert torch.equal(make(1).uniform(20, 0.0), make(1).uniform(20, 0.0))
    assert not torch.equal(make(1).uniform(20, 0.0), make(2).uniform(20, 0.0))
