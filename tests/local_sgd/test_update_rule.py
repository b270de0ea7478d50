"""The update rule: equal to the papers' rules, exact sums for any optimizer, the same weights on all ranks."""

import numpy as np
import pytest
import torch
from torch import nn

from lightning_gradcomp import DelayedAverager, Nesterov
from tests.averaging.workers import (
    Table,
    all_equal,
    backward,
    bowl_gradient,
    bowl_loss,
    conv_net,
    image_loss,
    train_ddp,
    weights,
)
from tests.local_sgd.training import CLOSE, OPTIMIZERS, run_ranks, set_up, train
from tests.reference.delayed import PaperDGA, PaperDiLoCo


def gradients(names, shapes, flats, step):
    """The flat gradient of every worker at its own weights."""
    found = []
    for rank, flat in enumerate(flats):
        parts = np.split(flat, np.cumsum([np.prod(s) for s in shapes])[:-1])
        named = {n: part.reshape(s) for n, part, s in zip(names, parts, shapes, strict=True)}
        found.append(np.concatenate([g.reshape(-1) for g in bowl_gradient(named, rank, step).values()]))
    return found


def follow(reference, steps):
    """The weights of all workers of `reference` after each of the steps: fp64 [steps, workers, n]."""
    table = dict(Table().named_parameters())
    names, shapes = list(table), [tuple(p.shape) for p in table.values()]
    history = []
    for step in range(steps):
        reference.step(gradients(names, shapes, reference.weights, step))
        history.append(np.stack([w.copy() for w in reference.weights]))
    return np.stack(history)


def weights_at_each_step(world, steps, optimizer, **options):
    """The weights of all ranks that use a DelayedAverager, after each step: fp32 [steps, workers, n]."""

    def work(rank, group):
        model, made, averager = set_up(group, optimizer, **options)
        history = []
        for step in range(steps):
            train(model, made, averager, rank, range(step, step + 1))
            history.append(weights(model))
        return torch.stack(history)

    return torch.stack(run_ranks(world, work), 1)


@pytest.mark.parametrize(("period", "delay"), [(1, 1), (4, 0), (4, 1), (4, 4), (5, 3)])
def test_plain_sgd_follows_the_dga_paper(period, delay):
    got = weights_at_each_step(3, 22, "sgd", period=period, delay=delay)
    expected = follow(PaperDGA(weights(Table()), 3, lr=0.02, period=period, delay=delay), 22)
    torch.testing.assert_close(got.double(), torch.from_numpy(expected), **CLOSE)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov"])
def test_period_1_and_delay_0_is_ddp(optimizer):
    def work(rank, group):
        model, made, averager = set_up(group, optimizer, conv_net, period=1, delay=0)
        train(model, made, averager, rank, 30, image_loss)
        other = conv_net()
        train_ddp(other, OPTIMIZERS[optimizer](other.parameters()), group, rank, 30, broadcast_buffers=False)
        torch.testing.assert_close(weights(model), weights(other), rtol=1e-5, atol=1e-6)
        return weights(model)

    assert all_equal(run_ranks(2, work))


def test_an_outer_optimizer_without_delay_is_diloco():
    got = weights_at_each_step(2, 20, "sgd", period=4, delay=0, outer=Nesterov(lr=0.7, momentum=0.9))
    reference = PaperDiLoCo(weights(Table()), 2, lr=0.02, period=4, outer_lr=0.7, outer_momentum=0.9)
    torch.testing.assert_close(got.double(), torch.from_numpy(follow(reference, 20)), **CLOSE)


def test_outer_lr_1_without_momentum_is_plain_averaging():
    plain = weights_at_each_step(2, 12, "adamw", period=4, delay=2)
    assert torch.equal(plain, weights_at_each_step(2, 12, "adamw", period=4, delay=2, outer=Nesterov(1.0, 0.0)))
    assert not torch.equal(plain, weights_at_each_step(2, 12, "adamw", period=4, delay=2, outer=Nesterov(1.0, 0.5)))


def hard_training(group, rank, optimizer, steps, **options):
    """With clipping, a learning rate schedule, and steps that one rank skips, as a loss scaler would.

    Returns:
        What each optimizer step added, fp64 [steps, n]; the weights after each step; the drained weights.
    """
    model, made, averager = set_up(group, optimizer, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(made, steps)
    updates, history = [], []
    for step in range(steps):
        backward(model, made, rank, step, bowl_loss)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        with averager.stepping():
            before = weights(model).double()
            if not (rank == 1 and step % 5 == 2):
                made.step()
            updates.append(weights(model).double() - before)
        scheduler.step()
        history.append(weights(model))
    averager.drain()
    return torch.stack(updates), torch.stack(history), weights(model)


@pytest.mark.parametrize(
    ("optimizer", "period", "delay"), [*((name, 4, 3) for name in OPTIMIZERS), ("adamw", 3, 3), ("adamw", 1, 1)]
)
def test_ranks_differ_only_by_their_latest_local_steps(optimizer, period, delay):
    """Updates that were applied are the same on all ranks, and the mean over ranks is exact, for every optimizer."""
    steps = 24
    how = {"period": period, "delay": delay, "pending_share": 1.0}
    results = run_ranks(3, lambda rank, group: hard_training(group, rank, optimizer, steps, **how))
    updates, history, drained = (torch.stack(parts) for parts in zip(*results, strict=True))
    shadow = weights(Table()).double() + updates.mean(0).cumsum(0)
    assert float(updates[0].sub(updates[2]).norm()) > 0.1
    torch.testing.assert_close(history.double().mean(0), shadow, **CLOSE)
    for t in (1, 2, 7, 13, 23, 24):
        arrived = max(t - delay, 0) // period * period
        own = updates[:, arrived:t].sum(1)
        apart = history[:, t - 1].double() - history[:, t - 1].double().mean(0)
        torch.testing.assert_close(apart, own - own.mean(0), **CLOSE)
    torch.testing.assert_close(drained[0].double(), shadow[-1], **CLOSE)
    assert all_equal(drained)


def test_all_ranks_start_with_rank_0s_model():
    def work(rank, group):
        model = conv_net()
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.add_(rank + 1)
        DelayedAverager(model, torch.optim.SGD(model.parameters(), lr=0.1), process_group=group)
        assert model[1].num_batches_tracked == 1
        return torch.cat([weights(model), model[1].running_mean])

    results = run_ranks(2, work)
    assert all_equal(results)
    assert torch.equal(results[0][:-8], weights(conv_net()) + 1)


def test_a_world_of_one_is_bitwise_the_optimizer():
    model, made, averager = set_up(None, "adamw", period=2, delay=1)
    train(model, made, averager, 0, 7)
    averager.drain()
    alone = Table()
    optimizer = OPTIMIZERS["adamw"](alone.parameters())
    for step in range(7):
        backward(alone, optimizer, 0, step, bowl_loss)
        optimizer.step()
    assert torch.equal(weights(model), weights(alone))
    assert averager.steps == 7


@pytest.mark.parametrize(("optimizer", "share"), [("adamw", 0.5), ("momentum", 1.0)])
def test_a_share_of_the_pending_update_stays_in_the_weights(optimizer, share):
    """By default half with AdamW. Nothing is lost when the average arrives."""
    period, delay = 4, 3
    results = run_ranks(3, lambda rank, group: hard_training(group, rank, optimizer, 40, period=period, delay=delay))
    updates, history, drained = (torch.stack(parts) for parts in zip(*results, strict=True))
    applied = weights(Table()).double() + updates.mean(0).cumsum(0)
    for t in (4, 5, 6, 8, 9, 21, 30, 38):
        ended = t // period * period
        start, waits = applied[ended - period - 1] if ended > period else weights(Table()).double(), t - ended < delay
        rank_1 = start + share * updates[1, ended - period : ended].sum(0) if waits else applied[ended - 1]
        expected = rank_1 + updates[1, ended:t].sum(0)
        torch.testing.assert_close(history[1, t - 1].double(), expected, **CLOSE)
    torch.testing.assert_close(drained[0].double(), applied[-1], **CLOSE)


def test_a_share_that_can_not_be_is_refused():
    model = Table()
    with pytest.raises(ValueError, match="pending_share"):
        DelayedAverager(model, torch.optim.SGD(model.parameters(), lr=0.1), pending_share=1.5)


def test_the_outer_step_is_torchfts_diloco():
    """torchft's published regression fixture of DiLoCo, without delay, of a layer that is averaged every 6 steps.

    Source: github.com/meta-pytorch/torchft, test_fixtures, diloco_regression_test, test_diloco_mocked_updates_0,
    layers.1.weight: gradients of 2, inner learning rate 1, outer 2 without momentum, two replicas.
    """
    published = [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53]

    def rank_main(rank, group):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        outer = Nesterov(lr=2.0, momentum=0.0)
        averager = DelayedAverager(model, optimizer, process_group=group, period=6, delay=0, outer=outer)
        history = [model.weight.item()]
        for _ in published[1:]:
            model.weight.grad = torch.full_like(model.weight, 2.0)
            averager.step()
            history.append(model.weight.item())
        return history

    assert run_ranks(2, rank_main) == [published] * 2
