"""Exchanges in the background: their results do not depend on when they are done; waits are recorded."""

import threading
from unittest import mock

import pytest
import torch

from lightning_gradcomp.local_sgd import background
from lightning_gradcomp.local_sgd.background import BackgroundExchange
from lightning_gradcomp.local_sgd.rounds import Rounds
from tests.averaging.methods import EVERY
from tests.averaging.workers import weights
from tests.local_sgd.simulation import simulated_exchanges
from tests.local_sgd.training import join_exchanges, run_ranks, set_up, train

CPU = torch.device("cpu")


def test_an_exchange_runs_in_the_background():
    may_end = threading.Event()
    exchange = BackgroundExchange(lambda: may_end.wait(10), 3, CPU)
    assert not exchange.done and not exchange.failed
    may_end.set()
    assert exchange.wait() is True
    assert exchange.done and not exchange.failed


def test_an_exchange_is_timed():
    times = iter([10.0, 12.5])
    with mock.patch.object(background, "perf_counter", lambda: next(times)):
        exchange = BackgroundExchange(lambda: None, 3, CPU)
        exchange.wait()
    assert exchange.seconds == 2.5


def test_an_error_in_an_exchange_is_raised_in_the_next_step():
    def broken(rounds, *reports):
        raise ArithmeticError("broken")

    def work(rank, group):
        model, optimizer, averager = set_up(group, period=2, delay=2)
        with pytest.raises(ArithmeticError, match="broken"):
            for step in range(4):
                train(model, optimizer, averager, rank, range(step, step + 1))
                join_exchanges()
        return averager.steps

    with mock.patch.object(Rounds, "exchange", broken):
        assert run_ranks(2, work) == [3, 3]  # although the average is due at step 4


@pytest.mark.parametrize("compressor", ["none", "gradient_dropping"])
def test_arrival_times_do_not_change_a_bit(compressor):
    def work(rank, group):
        model, optimizer, averager = set_up(group, "adamw", compressor=EVERY[compressor](), period=3, delay=2)
        train(model, optimizer, averager, rank, 20)
        own = weights(model)
        averager.drain()
        return torch.cat([own, weights(model)])

    in_background = run_ranks(3, work)
    with simulated_exchanges(lambda n: 0.0):
        at_start = run_ranks(3, work)
    with simulated_exchanges(lambda n: 0.0, run_in_wait=True):
        in_wait = run_ranks(3, work)
    assert all(map(torch.equal, in_background, at_start))
    assert all(map(torch.equal, in_background, in_wait))


def test_a_step_waits_for_a_late_average():
    """The first exchange takes as long as 6 steps, with a delay of 3."""

    def work(rank, group):
        model, optimizer, averager = set_up(group, period=4, delay=3)
        step_times, overlapped = [], []
        for step in range(12):
            begin = clock()
            clock.advance(1.0)
            train(model, optimizer, averager, rank, range(step, step + 1))
            step_times.append(clock() - begin)
            overlapped.append(averager.spent.overlapped_steps)
        return averager.spent, step_times, overlapped

    with simulated_exchanges(lambda n: [6.0, 2.0, 0.0][n]) as clock:
        results = run_ranks(2, work)
    for stats, step_times, overlapped in results:
        assert step_times == [1.0] * 6 + [4.0] + [1.0] * 5  # step 7 waits: 4 + 3, the round's end and the delay
        assert stats.rounds == 2  # the third is not due yet
        assert (stats.late_rounds, stats.stall_seconds) == (1, 3.0)
        assert overlapped == [0] * 4 + [1, 2, 3] + [0, 1, 1, 1] + [0]
