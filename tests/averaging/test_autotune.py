"""topology="auto" goes on with what was quicker when both were tried, alike on all ranks, and loses nothing by it."""

import threading
import warnings
from copy import deepcopy
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from lightning_gradcomp.averaging import trial
from lightning_gradcomp.compressors import schedules
from tests.averaging.workers import Table, all_equal, averaged, backward, prescribed_loss, same, weights
from tests.threads import run_ranks

UNCOUNTED, COUNTED = 2, 4
"""As in `trial`, but fewer."""
EACH = UNCOUNTED + COUNTED
pytestmark = pytest.mark.filterwarnings("ignore:DGC. Steps are dense")


@pytest.fixture
def clock(monkeypatch):
    """A clock that each rank's thread sets for itself, for short trials."""
    monkeypatch.setattr(trial, "UNCOUNTED", UNCOUNTED)
    monkeypatch.setattr(trial, "COUNTED", COUNTED)
    times = threading.local()
    times_of_thread = SimpleNamespace(perf_counter=lambda: times.now)
    monkeypatch.setattr(trial, "time", times_of_thread)
    return times


def run(model, averager, optimizer, rank, clock, steps, compressed, dense=1.0):
    """The sparsity of each step, where a compressed one takes `compressed` seconds and a dense one `dense`."""
    seen = []
    for step in steps:
        backward(model, optimizer, rank, step, prescribed_loss)
        clock.now = getattr(clock, "now", 0.0) + (compressed(averager.sparsity) if averager.sparsity else dense)
        averager.step()
        seen.append(averager.stats.sparsity)
    return seen


@pytest.mark.parametrize(
    ("world", "seconds", "rounds", "after"),
    [(2, 0.7, 1, 0.9), (2, 1.3, 1, 0.0), (2, 0.9, 2, 0.9), (2, 1.1, 2, 0.0), (2, 1.0, 2, 0.0), (3, 1.1, 2, 0.0)],
    ids=["much quicker", "much slower", "quicker", "slower", "equal", "slower, three ranks"],
)
def test_the_run_goes_on_with_what_was_quicker(world, seconds, rounds, after, clock):
    def rank_main(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, topology="auto")
        seen = run(model, averager, optimizer, rank, clock, range((2 * rounds + 1) * EACH), lambda sparsity: seconds)
        return seen, averager.trial.outcome, weights(model)

    results = run_ranks(world, rank_main)
    for seen, outcome, _ in results:
        assert seen == ([0.0] * EACH + [0.9] * EACH) * rounds + [after] * EACH
        assert outcome.startswith("Steps are compressed" if after else "Steps are dense")
        assert f"{1e3 * seconds:.1f} ms compressed and 1000.0 ms dense" in outcome
    assert all_equal([result[2] for result in results])


def test_a_mood_of_the_machine_that_meets_the_first_compressed_steps_decides_nothing(clock):
    """They take 1.2 times as long as dense ones, all that follow 0.9 times; the quickest quarter decides."""

    def rank_main(rank, group):
        own = [1.2] * EACH + [0.9] * 100
        model = Table()
        optimizer, averager = averaged(model, group, topology="auto")
        steps = range(5 * EACH)
        return run(model, averager, optimizer, rank, clock, steps, lambda sparsity: own.pop(0))[-1]

    assert run_ranks(2, rank_main) == [0.9, 0.9]


def test_the_slowest_rank_decides_for_all(clock):
    def rank_main(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, topology="auto")
        return run(model, averager, optimizer, rank, clock, range(3 * EACH), lambda sparsity: 0.5 if rank else 1.5)[-1]

    assert run_ranks(3, rank_main) == [0.0, 0.0, 0.0]


def test_the_first_rank_warns_once_and_says_how_to_compress_all_the_same(clock):
    def rank_main(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, topology="auto")
        run(model, averager, optimizer, rank, clock, range(3 * EACH), lambda sparsity: 2.0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, rank_main)
    [message] = [str(warning.message) for warning in caught if "dense" in str(warning.message)]
    assert message.startswith("DGC: Steps are dense from now on: one takes 2000.0 ms compressed and 1000.0 ms dense")
    assert "topology='all_gather'" in message


def test_a_sparser_level_is_tried_again(clock):
    """0.5 loses; 0.6 is not half as dense, so it is not tried; 0.8 is, and wins; 0.9 needs no trial any more."""
    levels = [0.5, 0.6, 0.8, 0.9]

    def rank_main(rank, group):
        model = Table()
        schedule = schedules.Ramp(tuple(levels), 0.9, dense=1, by="epoch")
        optimizer, averager = averaged(model, group, schedule=schedule, topology="auto", steps_per_epoch=2 * EACH)
        steps = range(2 * EACH * 5)
        return run(model, averager, optimizer, rank, clock, steps, lambda sparsity: 2.0 if sparsity < 0.7 else 0.5)

    for seen in run_ranks(2, rank_main):
        epochs = [seen[begin : begin + 2 * EACH] for begin in range(0, len(seen), 2 * EACH)]
        dense, tried = [0.0] * 2 * EACH, [0.5] * EACH + [0.0] * EACH
        assert epochs == [dense, tried, dense, [0.8] * 2 * EACH, [0.9] * 2 * EACH]


@pytest.mark.parametrize("seconds", [0.5, 0.9, 2.0], ids=["quicker", "close", "slower"])
def test_a_resumed_run_decides_as_the_whole_one(seconds, clock):
    """Wherever it was stopped: the states that runs resume from are saved on the way of the whole one."""
    stops, end = [3, EACH + 2, 2 * EACH + 5, 3 * EACH + 2], 4 * EACH + 3  # a close one is decided after 4 * EACH

    def rank_main(rank, group):
        def begin():
            model = Table()
            return model, *averaged(model, group, topology="auto")

        def go_on(parts, steps):
            model, optimizer, averager = parts
            run(model, averager, optimizer, rank, clock, steps, lambda sparsity: seconds)

        straight, states = begin(), []
        for start, stop in pairwise([0, *stops, end]):
            go_on(straight, range(start, stop))
            states.append(deepcopy([part.state_dict() for part in straight]))
        for stop, state in zip(stops, states, strict=False):
            resumed = begin()
            for part, saved in zip(resumed, state, strict=True):
                part.load_state_dict(saved)
            clock.now = 1e6  # the machine was off for a while
            go_on(resumed, range(stop, end))
            assert resumed[2].trial.won == straight[2].trial.won == (seconds < 1)
            assert same(resumed[2].state_dict()["memory"], straight[2].state_dict()["memory"])
            assert torch.equal(weights(resumed[0]), weights(straight[0]))

    run_ranks(2, rank_main)


def test_alone_or_dense_there_is_nothing_to_try():
    assert averaged(Table(), None, topology="auto")[1].trial is None

    def rank_main(rank, group):
        return averaged(Table(), group, compressor="none", topology="auto")[1].trial

    assert run_ranks(2, rank_main) == [None, None]


def test_all_gather_compresses_from_the_first_step():
    def rank_main(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, topology="all_gather")
        backward(model, optimizer, rank, 0, prescribed_loss)
        averager.step()
        return averager.stats.sparsity

    assert run_ranks(2, rank_main) == [0.9, 0.9]
