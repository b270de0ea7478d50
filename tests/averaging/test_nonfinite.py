"""A gradient that is not finite is seen on every rank and remembered on none."""

import math

import torch

from tests.averaging.workers import Table, averaged, backward, prescribed_loss, same, train, weights
from tests.threads import checked_collectives, run_ranks


def test_infinities_that_cancel_over_the_ranks_are_seen_too():
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group)
        backward(model, optimizer, rank, 0, prescribed_loss)
        model.kernel.grad.view(-1)[:2] = torch.tensor([math.inf, -math.inf]) * (1 - 2 * rank)
        averager.average()
        averager.commit()
        return bool(torch.isfinite(model.kernel.grad).all()), averager.state.state_dict()["velocity"]

    assert run_ranks(2, work) == [(False, {}), (False, {})]


def test_a_dense_step_may_follow_a_skipped_first_sparse_one():
    """Every rank must then do the same collective, also those whose own gradient was finite."""

    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, schedule=lambda epoch, step: 0.9 if step == 2 else 0.0)
        for step in range(5):
            backward(model, optimizer, rank, step, prescribed_loss)
            if step == 2:
                model.kernel.grad[0] = math.nan if rank else 1.0
                averager.average()
                averager.commit()
            else:
                averager.step()
        return weights(model)

    with checked_collectives(2):
        first, second = run_ranks(2, work)
    assert torch.equal(first, second)
    assert bool(torch.isfinite(first).all())


def test_a_dense_step_that_is_not_finite_keeps_what_is_unsent_also_where_it_is_committed():
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, schedule=lambda epoch, step: 0.9 if step < 2 else 0.0)
        train(model, optimizer, averager, rank, 2, prescribed_loss)
        before = averager.state_dict()["memory"]
        backward(model, optimizer, rank, 2, prescribed_loss)
        if rank:
            model.bias.grad[0] = math.nan
        averager.average()
        averager.commit()
        assert before["velocity"]["kernel"].any()
        assert same(averager.state_dict()["memory"], before)
        return any(bool(p.grad.isfinite().any()) for p in model.parameters())

    assert run_ranks(2, work) == [False, False]
