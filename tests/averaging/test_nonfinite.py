"""A gradient that is not finite is seen on every rank and remembered on none."""

import math
from functools import cache

import pytest
import torch

from tests.averaging.workers import Table, all_equal, averaged, backward, dgc, prescribed_loss, same, weights
from tests.threads import checked_collectives, run_ranks

STEPS = 12
SPOILT_AT = {"dense": 2, "first sparse": 4, "sparse": 6, "first dense again": 9, "dense again": 10}


def sparsity_of(step):
    return 0.9 if 4 <= step < 9 else 0.0


def run(world, spoilt_at=None, where="kernel", value=math.nan, bad_rank=1):
    """Train, with a spoilt gradient on one rank before step `spoilt_at`, whose update the user skips, as AMP does."""

    def work(rank, group):
        model, now = Table(), [0]
        compressor = dgc(clip_norm=30.0)
        optimizer, averager = averaged(model, group, compressor, lambda *_: sparsity_of(now[0]), nesterov=True)
        for now[0] in range(STEPS):
            if now[0] == spoilt_at:
                backward(model, optimizer, rank, 1000, prescribed_loss)
                if rank == bad_rank:
                    getattr(model, where).grad.view(-1)[3] = value
                before = averager.state.state_dict()
                averager.average()
                averager.commit()
                seen = all(not torch.isfinite(p.grad).all() for n, p in model.named_parameters() if n == where)
                assert seen, f"rank {rank} sees a finite gradient"
                after = averager.state.state_dict()
                assert now[0] == 4 or same(before, after), f"rank {rank} remembers it"
                assert all(torch.isfinite(part).all() for parts in after.values() for part in parts.values())
            backward(model, optimizer, rank, now[0], prescribed_loss)
            averager.step()
        return weights(model), averager.state.state_dict()

    return run_ranks(world, work)


@cache
def straight_run(world):
    """What every spoilt one is compared with."""
    return run(world)


@pytest.mark.parametrize(
    ("phase", "value"),
    [*((phase, math.nan) for phase in SPOILT_AT), ("sparse", math.inf), ("sparse", -math.inf)],
)
def test_a_skipped_step_leaves_no_trace(phase, value):
    straight, spoilt = straight_run(2), run(2, SPOILT_AT[phase], value=value)
    assert all_equal([values for values, _ in spoilt])
    assert torch.equal(spoilt[0][0], straight[0][0])
    assert all(same(memory, expected) for (_, memory), (_, expected) in zip(spoilt, straight, strict=True))


@pytest.mark.parametrize("where", ["kernel", "matrix", "small", "bias"])
@pytest.mark.parametrize("bad_rank", [0, 2])
def test_on_whichever_rank_and_in_whichever_tensor_it_lies(where, bad_rank):
    straight, spoilt = straight_run(3), run(3, SPOILT_AT["sparse"], where, math.nan, bad_rank)
    assert torch.equal(spoilt[0][0], straight[0][0])


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


def test_zero_gradients_are_no_trouble():
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, dgc(clip_norm=1.0))
        start = weights(model)
        for _ in range(3):
            optimizer.zero_grad()
            (0 * prescribed_loss(model, rank, 0)).backward()
            averager.step()
        return torch.equal(weights(model), start)

    assert run_ranks(2, work) == [True, True]
