"""Delayed averages: exact sums whatever the optimizer does, the same on all ranks, whenever messages arrive."""

import copy
import io
import threading
import time
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import lightning_gradcomp as lgc
from lightning_gradcomp import DelayedAverager, Nesterov
from lightning_gradcomp.averaging.roll_call import LENGTH, Report
from lightning_gradcomp.averaging.rounds import Rounds
from lightning_gradcomp.pace import Pace
from tests import threads
from tests.averaging.laws import EVERY, REMEMBERING
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
from tests.reference.delayed import PaperDGA, PaperDiLoCo
from tests.threads import checked_collectives, short_sum

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}
CODECS = {name: make for name, make in REMEMBERING.items() if "," not in name}
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


def run_ranks(world, work):
    """As `threads.run_ranks`; then nothing is under way any more in the groups, which are the next ranks'."""
    results = threads.run_ranks(world, work)
    for thread in threading.enumerate():
        if thread.name == "exchange":
            thread.join(10)
    return results


def set_up(group, optimizer="momentum", model=Table, **options):
    """A model, its optimizer and its averager."""
    model = model()
    made = OPTIMIZERS[optimizer](model.parameters())
    return model, made, DelayedAverager(model, made, process_group=group, **options)


def train(model, optimizer, averager, rank, steps, loss=bowl_loss):
    for step in steps if isinstance(steps, range) else range(steps):
        backward(model, optimizer, rank, step, loss)
        averager.step()


def gradients(names, shapes, flats, step):
    """Every worker's flat gradient at its own weights."""
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
    """The same of the averager: [steps, workers, n]."""

    def work(rank, group):
        model, made, averager = set_up(group, optimizer, **options)
        history = []
        for step in range(steps):
            train(model, made, averager, rank, range(step, step + 1))
            history.append(weights(model))
        return torch.stack(history)

    return torch.stack(run_ranks(world, work), 1)


# What it computes


@pytest.mark.parametrize(("period", "delay"), [(1, 1), (4, 0), (4, 1), (4, 4), (5, 3)])
def test_with_plain_sgd_it_is_the_papers_rule(period, delay):
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


def test_with_an_outer_optimizer_and_no_delay_it_is_diloco():
    got = weights_at_each_step(2, 20, "sgd", period=4, delay=0, outer=Nesterov(lr=0.7, momentum=0.9))
    reference = PaperDiLoCo(weights(Table()), 2, lr=0.02, period=4, outer_lr=0.7, outer_momentum=0.9)
    torch.testing.assert_close(got.double(), torch.from_numpy(follow(reference, 20)), **CLOSE)


def test_an_outer_optimizer_that_only_adds_is_none():
    plain = weights_at_each_step(2, 12, "adamw", period=4, delay=2)
    assert torch.equal(plain, weights_at_each_step(2, 12, "adamw", period=4, delay=2, outer=Nesterov(1.0, 0.0)))
    assert not torch.equal(plain, weights_at_each_step(2, 12, "adamw", period=4, delay=2, outer=Nesterov(1.0, 0.5)))


def hard_training(group, rank, optimizer, steps, **options):
    """With clipping, a schedule of the learning rate, and steps that one rank skips, as a loss scaler would.

    Returns:
        What the optimizer's own steps added, fp64 [steps, n]; the weights after each step; the drained weights.
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("period", "delay"), [(4, 3), (3, 3), (1, 1)])
def test_the_mean_over_ranks_is_exact_and_ranks_differ_by_their_latest_steps_alone(optimizer, period, delay):
    """Whatever the optimizer has made of the gradients: an update that has arrived is the same everywhere."""
    steps = 60
    results = run_ranks(3, lambda rank, group: hard_training(group, rank, optimizer, steps, period=period, delay=delay))
    updates, history, drained = (torch.stack(parts) for parts in zip(*results, strict=True))
    shadow = weights(Table()).double() + updates.mean(0).cumsum(0)
    assert float(updates[0].sub(updates[2]).norm()) > 0.1
    torch.testing.assert_close(history.double().mean(0), shadow, **CLOSE)
    for t in (1, 2, 7, 30, 59, 60):
        arrived = max(t - delay, 0) // period * period
        own = updates[:, arrived:t].sum(1)
        apart = history[:, t - 1].double() - history[:, t - 1].double().mean(0)
        torch.testing.assert_close(apart, own - own.mean(0), **CLOSE)
    torch.testing.assert_close(drained[0].double(), shadow[-1], **CLOSE)
    assert all_equal(drained)


@pytest.mark.parametrize(("period", "delay"), [(1, 1), (4, 2)])
def test_stale_only_applies_averages_alone_so_that_ranks_never_differ(period, delay):
    def work(rank, group):
        return hard_training(group, rank, "adamw", 20, period=period, delay=delay, stale_only=True)

    updates, history, drained = (torch.stack(parts) for parts in zip(*run_ranks(3, work), strict=True))
    sums = weights(Table()).double() + updates.mean(0).cumsum(0)
    for t in range(1, 21):
        assert all_equal(history[:, t - 1])
        arrived = max(t - delay, 0) // period * period
        expected = sums[arrived - 1] if arrived else weights(Table()).double()
        torch.testing.assert_close(history[0, t - 1].double(), expected, **CLOSE)
    assert all_equal(drained)
    torch.testing.assert_close(drained[0].double(), sums[-1], **CLOSE)


def test_all_start_with_rank_0s_weights_and_buffers():
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


def test_a_world_of_one_is_the_optimizer_to_the_bit():
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


# Compressed rounds


@pytest.mark.parametrize("make", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("delay", [0, 3])
def test_compressed_rounds_leave_ranks_equal_and_lose_nothing(make, delay):
    def work(rank, group):
        model, made, averager = set_up(group, "nesterov", compressor=make(), period=4, delay=delay)
        total = torch.zeros(len(weights(model)), dtype=torch.float64)
        between = []
        for step in range(20):
            backward(model, made, rank, step, bowl_loss)
            with averager.stepping():
                before = weights(model).double()
                made.step()
                total += weights(model).double() - before
            if step % 4 == 3:
                between.append(weights(model))
        averager.drain()
        return total, torch.stack(between), weights(model)

    totals, between, drained = (torch.stack(parts) for parts in zip(*run_ranks(3, work), strict=True))
    assert all_equal(drained)
    assert all_equal(between) == (delay == 0)
    expected = weights(Table()).double() + totals.mean(0)
    torch.testing.assert_close(drained[0].double(), expected, rtol=1e-4, atol=2e-5)
    if delay == 0:  # or nothing would have been left out that a drain could add
        assert float((between[0, -1].double() - expected).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_rounds_of_16_bits_are_rounded_and_half_as_long(name):
    def work(rank, group, compressor):
        model, made, averager = set_up(group, compressor=compressor, period=4, delay=4)
        train(model, made, averager, rank, 20)
        sent = averager.stats.bytes_sent
        averager.drain()
        return weights(model), sent

    got, sent = zip(*run_ranks(3, lambda rank, group: work(rank, group, name)), strict=True)
    expected, dense = zip(*run_ranks(3, lambda rank, group: work(rank, group, "none")), strict=True)
    assert all_equal(got)
    assert 1.9 < dense[0] / sent[0] < 2  # beside the reports
    error = float((got[0] - expected[0]).norm() / (expected[0] - weights(Table())).norm())
    assert 0 < error < 0.01


# When messages arrive


@contextmanager
def slow_transport(seconds):
    """Inside, the nth exchange of a round takes `seconds(n)` longer."""
    count = iter(range(10**6))
    exchange = Rounds.exchange

    def slowed(rounds, *reports):
        time.sleep(seconds(next(count)))
        return exchange(rounds, *reports)

    with mock.patch.object(Rounds, "exchange", slowed):
        yield


@pytest.mark.parametrize("compressor", ["none", "gradient_dropping"])
def test_when_messages_arrive_changes_no_bit(compressor):
    made = EVERY[compressor]()

    def work(rank, group):
        model, optimizer, averager = set_up(group, "adamw", compressor=made, period=3, delay=2)
        train(model, optimizer, averager, rank, 20)
        own = weights(model)
        averager.drain()
        return torch.cat([own, weights(model)]), averager.stats

    expected, _ = zip(*run_ranks(3, work), strict=True)
    with slow_transport(lambda n: 0.003 * (7 * n % 5)):
        got, stats = zip(*run_ranks(3, work), strict=True)
    assert all(map(torch.equal, got, expected))
    assert max(each.stall_seconds for each in stats) > 0.001


def test_a_message_that_is_late_is_waited_for_at_its_step_and_the_wait_is_booked():
    def work(rank, group):
        model, optimizer, averager = set_up(group, period=4, delay=3)
        times = []
        for step in range(12):
            begin = time.monotonic()
            train(model, optimizer, averager, rank, range(step, step + 1))
            times.append(time.monotonic() - begin)
        return averager.stats, times

    with slow_transport(lambda n: 0.4 if n < 2 else 0.0):  # both ranks' first messages
        (stats, times), _ = run_ranks(2, work)
    assert stats.rounds == 2  # the third has not landed
    assert stats.late_rounds >= 1  # steps are short here
    assert stats.stall_seconds > 0.1
    assert max(range(12), key=times.__getitem__) == 6  # three steps after the end of the first round, step 3


def test_there_is_one_exchange_in_each_round():
    def work(rank, group):
        model, optimizer, averager = set_up(group, period=4, delay=3)
        log[rank].clear()
        train(model, optimizer, averager, rank, 23)
        return averager.stats

    with checked_collectives(3) as log:
        stats = run_ranks(3, work)
        message = 4 * (len(weights(Table())) + len(list(Table().parameters())) + 1)
        gradients = 4 * len(weights(Table()))
        assert log[0] == [("all_to_all_single", LENGTH), *short_sum(3, message)] * 5
    assert stats[0].rounds == 5
    assert stats[0].bytes_sent == 5 * (2 * LENGTH + round(4 / 3 * gradients))


# Samples


@pytest.mark.parametrize("compressor", ["none", "fp16", "bf16", "gradient_dropping"])
def test_averages_are_weighted_by_the_samples_of_the_round(compressor):
    def work(rank, group):
        model, optimizer, averager = set_up(group, "sgd", period=2, delay=0, compressor=EVERY[compressor]())
        for step, samples in enumerate([(5, 4), (1, 2)][rank]):
            backward(model, optimizer, rank, step, bowl_loss)
            with averager.stepping(weight=samples):
                optimizer.step()
                own = weights(model)
        return own - weights(Table()), weights(model) - weights(Table())

    (first, got), (second, _) = run_ranks(2, work)
    expected = 0.75 * first + 0.25 * second
    if compressor == "gradient_dropping":  # tensors that travel as they are
        got, expected = got[-19:], expected[-19:]
    error = (got - expected).norm() / expected.norm()
    assert float(error) < (1e-6 if compressor in ("none", "gradient_dropping") else 0.01)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("compressor", ["none", "gradient_dropping"])
def test_a_rank_without_data_takes_part_and_is_not_counted(delay, compressor):
    """Rank 1 has no more batches from step 4 on: what is added then is rank 0's alone."""

    def work(rank, group):
        options = {"period": 4, "delay": delay, "compressor": EVERY[compressor]()}
        model, optimizer, averager = set_up(group, "momentum", **options)
        train(model, optimizer, averager, rank, 4)
        averager.drain()
        start, total = weights(model), torch.zeros(679)
        for step in range(4, 15):
            if rank == 0:
                backward(model, optimizer, rank, step, bowl_loss)
                with averager.stepping():
                    before = weights(model)
                    optimizer.step()
                    total += weights(model) - before
            else:
                averager.step(0)
        averager.drain()
        return weights(model), start + total

    (drained, expected), (other, _) = run_ranks(2, work)
    assert torch.equal(drained, other)
    torch.testing.assert_close(drained, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("stale_only", [False, True])
def test_a_round_in_which_a_rank_met_a_nan_is_the_others(delay, stale_only):
    """Rank 1 loses its round, not the run: it starts again from the average, and counts in the next round."""

    def work(rank, group, nan):
        model, optimizer, averager = set_up(group, "adamw", period=4, delay=delay, stale_only=stale_only)
        for step in range(8):
            backward(model, optimizer, rank, step, bowl_loss)
            if nan and rank == 1 and step == 1:
                model.matrix.grad[3, 4] = torch.nan
            averager.step(0 if not nan and rank == 1 and step < 4 else 1)
        middle = weights(model)
        averager.drain()
        return middle, weights(model)

    got = run_ranks(2, lambda rank, group: work(rank, group, True))
    assert all(tensor.isfinite().all() for pair in got for tensor in pair)
    assert torch.equal(got[0][1], got[1][1])
    if delay == 0:
        spared = run_ranks(2, lambda rank, group: work(rank, group, False))
        # Adam's moments of rank 1 differ a little between the two: it has seen gradients in one of them
        assert float((got[0][1] - spared[0][1]).abs().mean()) < 0.02

    def first_round(rank, group):
        model, optimizer, averager = set_up(group, "adamw", period=4, delay=0)
        train(model, optimizer, averager, 0, 4)  # all ranks have rank 0's data
        return weights(model)

    def with_nan(rank, group):
        model, optimizer, averager = set_up(group, "adamw", period=4, delay=0)
        for step in range(4):
            backward(model, optimizer, rank, step, bowl_loss)
            if rank == 1:
                model.bias.grad[2] = torch.inf
            averager.step()
        return weights(model)

    torch.testing.assert_close(run_ranks(2, with_nan)[1], run_ranks(2, first_round)[0], **CLOSE)


def test_ranks_that_run_out_of_data_at_different_steps_end_together():
    """As docs/latency.md has it."""

    def work(rank, group):
        model, optimizer, averager = set_up(group, "momentum", period=4, delay=2)
        batches = iter(range([5, 14, 9][rank]))
        while not all(averager.flags):
            step = next(batches, None)
            averager.flag = step is None
            if step is not None:
                backward(model, optimizer, rank, step, bowl_loss)
            averager.step(0 if step is None else 1)
        averager.drain()
        return weights(model), averager.steps

    results = run_ranks(3, work)
    assert all_equal([drained for drained, _ in results])
    assert {steps for _, steps in results} == {18}  # the round that ends at step 16 is the first that all have left


def test_how_far_ranks_are_apart_is_known_one_round_later():
    def work(rank, group):
        model, optimizer, averager = set_up(group, period=4, delay=2)
        train(model, optimizer, averager, rank, 4)
        first = weights(model).double()
        train(model, optimizer, averager, rank, range(4, 8))
        second = weights(model).double()
        assert averager.stats.apart == 0
        train(model, optimizer, averager, rank, range(8, 10))  # the second round lands, with the reports on the first
        return first, second, averager.stats.apart

    first, second, found = zip(*run_ranks(3, work), strict=True)
    mean = torch.stack(first).mean(0)
    apart = torch.stack([(own - mean).square().sum() for own in first]).mean().sqrt()
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(float(apart / torch.stack(second).mean(0).norm()), rel=1e-4)


# How long rounds are


def test_auto_hides_the_exchange_that_it_has_measured():
    """Exchanges of 60 ms behind steps of 10 ms."""

    def work(rank, group):
        model, optimizer, averager = set_up(group, period=2, delay="auto")
        paces = []
        for step in range(60):
            time.sleep(0.01)
            train(model, optimizer, averager, rank, range(step, step + 1))
            paces.append((averager.period, averager.delay))
            if step == 39:
                late = averager.stats.late_rounds
        averager.drain()
        return weights(model), paces, averager.stats.late_rounds - late

    with slow_transport(lambda n: 0.06):
        results = run_ranks(2, work)
    assert all_equal([drained for drained, _, _ in results])
    paces = results[0][1]
    assert paces == results[1][1]
    assert paces[:5] == [(2, 0)] * 5  # three rounds are measured
    period, delay = paces[-1]
    assert 4 <= delay <= 20 and period == delay
    assert results[0][2] <= 1  # hidden, but for the noise of this machine


def test_what_auto_has_chosen_is_in_the_state():
    def report(step, exchange):
        return Report(1, step_seconds=step, exchange_seconds=exchange)

    pace = Pace(4, "auto")
    for _ in range(3):
        assert pace.measuring and (pace.period, pace.delay) == (4, 0)
        pace.landed([report(0.02, 0.1), report(0.01, 0.05)])
    assert not pace.measuring and (pace.period, pace.delay) == (12, 12)  # 1.2 * 0.1 s in steps of 0.01 s
    pace.landed([report(0.1, 0.01), report(0.1, 0.02)])
    assert pace.delay == 12
    pace.choose()  # at a drain
    assert (pace.period, pace.delay) == (4, 1)
    resumed = Pace(4, "auto")
    resumed.load_state_dict(pace.state_dict())
    assert not resumed.measuring and (resumed.period, resumed.delay) == (4, 1)
    slow = Pace(4, "auto")
    slow.load_state_dict({"period": 4, "delay": 0, "left": 1})
    slow.landed([report(0.001, 9.0)])
    assert (slow.period, slow.delay) == (64, 64)
    given = Pace(8, 3)
    given.load_state_dict(pace.state_dict())
    assert (given.period, given.delay) == (8, 3)


def test_what_an_exchange_raises_is_raised_in_the_step():
    def broken(rounds, *reports):
        raise ArithmeticError("broken")

    def work(rank, group):
        model, optimizer, averager = set_up(group, period=2, delay=2)
        with pytest.raises(ArithmeticError, match="broken"):
            for step in range(4):
                train(model, optimizer, averager, rank, range(step, step + 1))
                time.sleep(0.05)
        return averager.steps

    with mock.patch.object(Rounds, "exchange", broken):
        assert run_ranks(2, work) == [3, 3]  # at the next step, though it is due at step 4


# Draining


class Buffered(nn.Module):
    """Batch norm, and buffers of every kind."""

    def __init__(self):
        super().__init__()
        self.net = conv_net()
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("table", torch.linspace(0, 1, 37) * 0.1)
        self.register_buffer("index", torch.tensor([2**40 + 1, -3]))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.cache = torch.zeros(len(x))
        return self.net(x)


def test_a_drain_brings_buffers_and_moments_together():
    def work(rank, group):
        model, optimizer, averager = set_up(group, "adamw", Buffered, period=4, delay=2)
        train(model, optimizer, averager, rank, 6, image_loss)
        own = model.net[1].running_var.clone(), optimizer.state[model.net[0].weight]["exp_avg_sq"].clone()
        averager.drain()
        after = model.net[1].running_var.clone(), optimizer.state[model.net[0].weight]["exp_avg_sq"].clone()
        assert torch.equal(model.table, torch.linspace(0, 1, 37) * 0.1)
        assert torch.equal(model.index, torch.tensor([2**40 + 1, -3]))
        assert torch.equal(model.mask, torch.full((3, 3), -torch.inf).triu(1))
        assert model.net[1].num_batches_tracked == 6
        return own, after

    results = run_ranks(3, work)
    for number in range(2):
        owns, afters = ([pair[side][number] for pair in results] for side in (0, 1))
        assert all_equal(afters)
        assert not all_equal(owns)
        torch.testing.assert_close(afters[0], torch.stack(owns).mean(0), **CLOSE)


def test_a_rank_that_never_had_a_batch_can_be_drained():
    def work(rank, group):
        model, optimizer, averager = set_up(group, "adamw", conv_net, period=2, delay=1)
        if rank == 0:
            train(model, optimizer, averager, rank, 5, image_loss)
        else:
            for _ in range(5):
                averager.step(0)
        averager.drain()
        return torch.cat([weights(model), model[1].running_var])

    results = run_ranks(2, work)
    assert all_equal(results)
    assert not torch.equal(results[0][:-8], weights(conv_net()))


def test_a_drain_heals_a_rank_whose_buffers_are_not_finite():
    def work(rank, group):
        model, optimizer, averager = set_up(group, "momentum", conv_net, period=4, delay=2)
        train(model, optimizer, averager, rank, 3, image_loss)
        if rank == 1:
            model(torch.full((4, 3, 6, 6), torch.nan))
            assert model[1].running_mean.isnan().all()
        own = model[1].running_mean.clone()
        averager.drain()
        return model[1].running_mean.clone(), own

    (got, own), (other, _) = run_ranks(2, work)
    assert torch.equal(got, other)
    torch.testing.assert_close(got, own)


def test_a_second_drain_does_nothing():
    def work(rank, group):
        model, optimizer, averager = set_up(group, period=4, delay=2, compressor=EVERY["gradient_dropping"]())
        train(model, optimizer, averager, rank, 7)
        averager.drain()
        drained, sent = weights(model), averager.stats.bytes_sent
        averager.drain()
        assert averager.stats.bytes_sent == sent
        assert torch.equal(weights(model), drained)

    run_ranks(2, work)


@pytest.mark.parametrize("stale_only", [False, True])
def test_a_rank_that_rests_needs_nobody(stale_only):
    """It goes back to the latest average, which every rank has, while the next is under way."""

    def work(rank, group):
        model, optimizer, averager = set_up(group, period=4, delay=3, stale_only=stale_only)
        assert not averager.rest()
        train(model, optimizer, averager, rank, 7)
        landed = weights(model)
        train(model, optimizer, averager, rank, range(7, 10))
        assert averager.rest()
        return landed, weights(model)

    landed, rested = zip(*run_ranks(3, work), strict=True)
    assert all_equal(rested)
    if stale_only:
        assert torch.equal(landed[0], rested[0])
    else:  # the first round's average: steps 1 to 4 of all ranks
        assert not all_equal(landed)


def stored(*parts):
    """What `torch.load` makes of a checkpoint of these, without running code from it."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "options",
    [
        {"period": 4, "delay": 3},
        {"period": 4, "delay": 4, "compressor": EVERY["gradient_dropping"]()},
        {"period": 3, "delay": 0, "outer": Nesterov()},
        {"period": 3, "delay": 2, "stale_only": True},
    ],
    ids=str,
)
def test_a_resumed_run_is_the_run_that_drained_there_to_the_bit(options):
    """All ranks resume from rank 0's checkpoint."""

    def straight(rank, group):
        model, optimizer, averager = set_up(group, "adamw", conv_net, **options)
        train(model, optimizer, averager, rank, 10, image_loss)
        state = averager.state_dict()  # drains before the others are read
        saved = [*stored(model, optimizer), state]
        train(model, optimizer, averager, rank, range(10, 21), image_loss)
        return saved, torch.cat([weights(model), model[1].running_mean])

    results = run_ranks(3, straight)
    saved = results[0][0]

    def resumed(rank, group):
        model, optimizer, averager = set_up(group, "adamw", conv_net, **options)
        train(model, optimizer, averager, rank, 5, image_loss)  # something that loading has to replace
        own = copy.deepcopy(saved)  # an optimizer takes tensors as they are, and ranks are threads here
        for part, state in zip((model, optimizer, averager), own, strict=True):
            part.load_state_dict(state)
        assert averager.steps == 10
        train(model, optimizer, averager, rank, range(10, 21), image_loss)
        return torch.cat([weights(model), model[1].running_mean])

    for got, (_, expected) in zip(run_ranks(3, resumed), results, strict=True):
        assert torch.equal(got, expected)


def test_a_parameter_may_be_frozen_and_unfrozen():
    def work(rank, group):
        model, optimizer, averager = set_up(group, period=4, delay=2, compressor=EVERY["onebit"]())
        train(model, optimizer, averager, rank, 6)
        model.matrix.requires_grad_(False)
        model.matrix.grad = None
        frozen = weights_after(averager, model, optimizer, rank, range(6, 7))
        assert torch.equal(frozen, weights_after(averager, model, optimizer, rank, range(7, 13)))
        model.matrix.requires_grad_(True)
        assert not torch.equal(frozen, weights_after(averager, model, optimizer, rank, range(13, 16)))
        averager.drain()
        return weights(model)

    def weights_after(averager, model, optimizer, rank, steps):
        train(model, optimizer, averager, rank, steps)
        return model.matrix.detach().clone()

    assert all_equal(run_ranks(2, work))


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"period": 4, "delay": 5}, r"delay: got 5, allowed: 0 to 4"),
        ({"period": 0, "delay": 0}, r"period: got 0, allowed: a whole number of steps, 1 or more"),
        ({"delay": "soon"}, r"delay: got 'soon', allowed: 0 to 8.*'auto'"),
        ({"compressor": "dgc"}, r"steps_per_epoch.*"),
    ],
    ids=str,
)
def test_what_can_not_be_done_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        set_up(None, **options)


def test_wrapped_and_double_models_and_negative_weights_are_refused():
    model = Table().double()
    with pytest.raises(ValueError, match=r"'kernel'.*float64.*16 or 32 bits"):
        DelayedAverager(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="weight: got -1"):
        set_up(None)[2].step(-1)
    for options in ({"lr": 0.0}, {"momentum": 1.0}):
        with pytest.raises(ValueError, match="Nesterov"):
            Nesterov(**options)

    def work(rank, group):
        wrapped = nn.parallel.DistributedDataParallel(Table(), process_group=group)
        with pytest.raises(ValueError, match="the module inside it"):
            DelayedAverager(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), process_group=group)

    run_ranks(2, work)


def test_it_is_public():
    assert lgc.DelayedAverager is DelayedAverager
    assert lgc.Nesterov is Nesterov
