"""Sparsity as a function of progress: dense, then rising, then constant."""

from itertools import pairwise

import pytest
import torch

from lightning_gradcomp import entries
from lightning_gradcomp.compressors import DGC, LossyCompressor, OneBit
from lightning_gradcomp.compressors.schedules import Ramp, as_levels, check_sparsity, exponential, linear, quarters

PAPER = (0.75, 0.9375, 0.984375, 0.996)


def over_epochs(schedule, epochs):
    return [schedule(epoch, 1000 * epoch) for epoch in range(epochs)]


def test_the_papers_ramp_is_one_level_an_epoch():
    ramp = Ramp(PAPER, 0.999)
    assert over_epochs(ramp, 7) == [*PAPER, 0.999, 0.999, 0.999]


def test_dense_epochs_come_before_the_ramp():
    ramp = Ramp(PAPER, 0.999, dense=2)
    assert over_epochs(ramp, 8) == [0, 0, *PAPER, 0.999, 0.999]


def test_a_ramp_by_steps_counts_steps_alone():
    ramp = Ramp((0.5, 0.75), 0.9, dense=1, by="step")
    assert [ramp(99, step) for step in range(5)] == [0, 0.5, 0.75, 0.9, 0.9]
    assert not ramp.counts_epochs


def test_by_coverage_each_level_sends_as_many_entries_as_there_are():
    ramp = Ramp((0.75, 0.9375, 0.99), 0.999, dense=2, by="coverage")
    levels = [ramp(99, step) for step in range(2 + 4 + 16 + 100 + 2)]
    assert levels == [0] * 2 + [0.75] * 4 + [0.9375] * 16 + [0.99] * 100 + [0.999] * 2
    assert not ramp.counts_epochs


@pytest.mark.parametrize("sparsity", [0.9, 0.97, 0.996, 0.999])
def test_by_coverage_a_level_costs_the_same_at_every_density(sparsity):
    levels = exponential(sparsity, 3)
    ramp = Ramp(tuple(levels), sparsity, by="coverage")
    sent = dict.fromkeys(levels, 0.0)
    for step in range(2000):
        if (now := ramp(0, step)) in sent:
            sent[now] += 1 - now
    assert all(1 <= entries < 2 - level for level, entries in sent.items())


def test_a_constant_needs_no_epochs():
    assert not Ramp((), 0.99).counts_epochs
    assert Ramp((), 0.99)(0, 0) == 0.99
    assert Ramp((), 0.99, dense=1).counts_epochs
    assert Ramp((0.5,), 0.99).counts_epochs


def test_four_exponential_levels_to_999_are_the_papers_list():
    assert exponential(0.999, 4) == pytest.approx(PAPER, abs=1.5e-3)


def test_quarters_from_75_are_the_papers_list():
    assert quarters(0.75, 0.999) == pytest.approx(PAPER, abs=1e-4)
    assert quarters(0.75, 0.75) == quarters(0.9, 0.75) == quarters(0.75, 0.0) == []


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("periods", [0, 1, 4, 9])
def test_exponential_levels_divide_the_density_by_one_factor(sparsity, periods):
    densities = [1.0, *(1 - level for level in exponential(sparsity, periods)), 1 - sparsity]
    factors = [after / before for before, after in pairwise(densities)]
    assert len(densities) == periods + 2
    assert factors == pytest.approx([factors[0]] * (periods + 1))


def test_linear_levels_are_equal_steps():
    assert linear(0.8, 3) == pytest.approx([0.2, 0.4, 0.6])
    assert linear(0.8, 0) == []


def test_levels_are_named_or_listed():
    assert as_levels("exponential", 0.999, 4) == tuple(exponential(0.999, 4))
    assert as_levels("linear", 0.8, 3) == tuple(linear(0.8, 3))
    assert as_levels([0.1, 0.2], 0.999, 4) == (0.1, 0.2)
    with pytest.raises(ValueError, match="schedule: got 'cubic', allowed: 'exponential', 'linear'"):
        as_levels("cubic", 0.9, 3)


@pytest.mark.parametrize("cls", [entry.cls for entry in entries() if issubclass(entry.cls, LossyCompressor)])
def test_no_warm_up_is_as_long_as_the_epoch_unless_asked(cls):
    """In a stream of data, which is one epoch, every method compresses after a number of steps."""
    default, chosen, none = cls().schedule(), cls(warmup_steps=3).schedule(), cls(warmup_steps=0).schedule()
    assert sum(default(0, step) == 0 for step in range(1000)) == (0 if cls is DGC else 22)
    assert [chosen(0, step) != 0 for step in range(5)] == [False, False, False, True, True]
    assert none(0, 0) != 0
    assert not default.counts_epochs and cls(warmup_epochs=2).schedule().counts_epochs


def test_a_warm_up_counts_steps_or_epochs():
    for options in ({"warmup_steps": 5, "warmup_epochs": 1}, {"warmup_steps": 5, "warmup_epochs": 0}):
        with pytest.raises(ValueError, match=r"OneBit.warmup_steps with warmup_epochs: got 5, allowed: None"):
            OneBit(**options)
    with pytest.raises(ValueError, match=r"OneBit.warmup_steps: got -1, allowed: a whole number from 0"):
        OneBit(warmup_steps=-1)
    assert OneBit(warmup_epochs=0).schedule()(0, 0) is None


def test_dgc_is_dense_then_exponential_then_constant():
    schedule = DGC(sparsity=0.99, warmup_epochs=3, dense_epochs=2).schedule()
    assert over_epochs(schedule, 7) == [0, 0, *exponential(0.99, 3), 0.99, 0.99]


def test_dgc_begins_with_more_elements_by_coverage():
    schedule = DGC().schedule()
    steps = [schedule(0, step) for step in range(90)]
    assert steps == [0.9375] * 16 + [0.984375] * 64 + [0.996] * 10
    assert [DGC(warmup_steps=2).schedule()(0, step) for step in (0, 1, 2, 17, 18)] == [0, 0, 0.9375, 0.9375, 0.984375]
    assert DGC(sparsity=0.9).schedule()(0, 0) == 0.9
    assert DGC(start_sparsity=0.996).schedule()(0, 0) == 0.996
    assert [DGC(start_sparsity=0.0, sparsity=0.9).schedule()(0, step) for step in range(6)] == [0] + [0.75] * 4 + [0.9]


def test_dgc_with_adam_begins_with_what_it_ends_with():
    parameters = [torch.zeros(3, requires_grad=True)]
    adam, sgd = torch.optim.AdamW(parameters), torch.optim.SGD(parameters, lr=0.1)
    assert DGC().for_optimizer(adam).schedule()(0, 0) == 0.97
    assert DGC(start_sparsity=0.9).for_optimizer(adam).schedule()(0, 0) == 0.9
    assert DGC(warmup_epochs=1).for_optimizer(adam).schedule()(0, 0) == pytest.approx(1 - 0.03**0.5)
    assert DGC().for_optimizer(sgd).schedule()(0, 0) == 0.9375


def test_dgc_refuses_two_warm_ups():
    with pytest.raises(ValueError, match=r"DGC.start_sparsity: got 1.5, allowed: 0 <= sparsity < 1"):
        DGC(start_sparsity=1.5)
    for epochs in ({"warmup_epochs": 1}, {"dense_epochs": 1}):
        with pytest.raises(
            ValueError, match=r"DGC.start_sparsity: got 0.9, allowed: None together with dense_epochs or warmup"
        ):
            DGC(start_sparsity=0.9, **epochs)
        with pytest.raises(ValueError, match=r"DGC.warmup_steps with (dense|warmup)_epochs: got 5, allowed: None"):
            DGC(warmup_steps=5, **epochs)


@pytest.mark.parametrize("wrong", [1, 1.0, -0.1, 2, float("nan"), float("inf")])
def test_a_sparsity_outside_its_range_is_refused(wrong):
    with pytest.raises(ValueError, match=r"x: got .*, allowed: 0 <= sparsity < 1"):
        check_sparsity("x", wrong)
    with pytest.raises(ValueError, match="sparsity level"):
        Ramp((0.5, wrong), 0.9)
    with pytest.raises(ValueError, match="sparsity level"):
        Ramp((), wrong)


def test_a_ramp_refuses_unknown_periods():
    with pytest.raises(ValueError, match="dense periods: got -1, allowed: a whole number from 0"):
        Ramp((), 0.9, dense=-1)
    with pytest.raises(ValueError, match="by: got 'batch', allowed: 'epoch', 'step' or 'coverage'"):
        Ramp((), 0.9, by="batch")
