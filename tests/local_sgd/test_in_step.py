"""Ranks that are not at the same step, or train other parameters, say so on every rank; gloo would abort."""

import pytest

from lightning_gradcomp.averaging.faults import ExchangeFailed
from tests.local_sgd.training import run_ranks, set_up, train

RULES = {
    "local SGD": {"period": 4, "delay": 0},
    "each step": {"period": 1, "delay": 0},
    "delayed": {"period": 4, "delay": 3},
    "error decay": {"period": 4, "delay": 0, "error_decay": 0.9},
}


@pytest.mark.parametrize("rule", RULES)
def test_ranks_with_different_numbers_of_batches(rule):
    def work(rank, group):
        model, optimizer, averager = set_up(group, **RULES[rule])
        with pytest.raises(ExchangeFailed) as caught:
            train(model, optimizer, averager, rank, [10, 13][rank])
            averager.drain()
        return str(caught.value)

    met = 11 if rule == "each step" else 12
    for rank, said in enumerate(run_ranks(2, work)):
        assert f"rank {rank} of 2, step {[10, met][rank]}, " in said
        assert f"rank 0 is at step 10, rank 1 is at step {met}. All ranks must have the same number of batches" in said


@pytest.mark.parametrize("steps", [4, 5])
def test_a_drain_on_one_rank_alone(steps):
    """As where rank 0 alone saves a checkpoint, at the end of a round or in it."""

    def work(rank, group):
        model, optimizer, averager = set_up(group, period=4, delay=0)
        train(model, optimizer, averager, rank, steps)
        with pytest.raises(ExchangeFailed, match=f"rank 0 is at step {steps}, rank 1 is at step 8"):
            averager.drain() if rank == 0 else train(model, optimizer, averager, rank, 4)

    run_ranks(2, work)


@pytest.mark.parametrize("rule", RULES)
def test_a_parameter_that_is_frozen_on_one_rank_is_named(rule):
    def work(rank, group):
        model, optimizer, averager = set_up(group, **RULES[rule])
        train(model, optimizer, averager, rank, 5)
        model.matrix.requires_grad_(rank != 1)
        with pytest.raises(ValueError, match="parameters that train: got 'matrix, which is frozen on rank 1 only'"):
            train(model, optimizer, averager, rank, 8)

    run_ranks(2, work)
