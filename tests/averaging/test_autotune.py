"""topology="auto" goes on with what a trial found quickest, alike on all ranks, and loses nothing by it."""

import warnings
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import nn

from lightning_gradcomp import GradientAverager
from lightning_gradcomp.averaging.autotune import ROUNDS
from lightning_gradcomp.compressors.schedules import Ramp
from tests.averaging.methods import LOSSY, PARTITIONED
from tests.averaging.simulated_clock import EACH, simulated_clock, timed_steps
from tests.averaging.workers import Table, all_equal, averaged, prescribed_loss, train, weights
from tests.threads import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*Steps are dense")
DENSE, GATHER, PHASES = "dense", "all_gather", "two_phase"


@pytest.fixture(autouse=True)
def clock():
    with simulated_clock() as clock:
        yield clock


def begin(group, compressor=None, schedule=None, **options):
    model = Table()
    return model, *averaged(model, group, compressor, schedule, topology="auto", **options)


def takes(all_gather=2.0, two_phase=2.0, dense=1.0):
    """Seconds of a step, whatever its sparsity."""
    seconds = {DENSE: dense, GATHER: all_gather, PHASES: two_phase}
    return lambda what, sparsity: seconds[what]


TRIALS = {
    "much quicker": (2, takes(0.7), [[DENSE, GATHER]], GATHER),
    "much slower": (2, takes(1.3), [[DENSE, GATHER]], DENSE),
    "quicker": (2, takes(0.9), [[DENSE, GATHER]] * 2, GATHER),
    "slower": (2, takes(1.1), [[DENSE, GATHER]] * 2, DENSE),
    "equal": (2, takes(1.0), [[DENSE, GATHER]] * 2, DENSE),
    "three ranks, a gather": (3, takes(0.5, 0.7), [[DENSE, GATHER, PHASES]], GATHER),
    "three ranks, shards": (3, takes(0.7, 0.5), [[DENSE, GATHER, PHASES]], PHASES),
    "three ranks, two are close": (3, takes(0.6, 0.5), [[DENSE, GATHER, PHASES], [GATHER, PHASES]], PHASES),
    "three ranks, dense is close": (3, takes(2.0, 1.1), [[DENSE, GATHER, PHASES], [DENSE, PHASES]], DENSE),
    "three ranks, all are close": (3, takes(1.1, 0.9), [[DENSE, GATHER, PHASES]] * 2, PHASES),
}
"""Ranks, seconds of a step, the candidates of each round, and what comes after."""


@pytest.mark.parametrize(("world", "seconds", "rounds", "after"), TRIALS.values(), ids=TRIALS)
def test_the_run_goes_on_with_what_was_quickest(world, seconds, rounds, after, clock):
    expected = [what for candidates in rounds for what in candidates for _ in range(EACH)]

    def work(rank, group):
        parts = begin(group)
        assert all(what in parts[2].describe() for what in rounds[0])
        seen = timed_steps(parts, rank, clock, range(len(expected) + EACH), seconds)
        assert parts[2].autotune.outcome in parts[2].describe()
        return seen, parts[2].summary()["topology"], parts[2].autotune.outcome, weights(parts[0])

    results = run_ranks(world, work)
    for seen, topology, outcome, _ in results:
        assert seen == expected + [after] * EACH
        assert outcome.startswith(
            "Steps are dense from now on" if after == DENSE else f"Steps are compressed ({after})"
        )
        assert all(f"{1e3 * seconds(what, 0):.1f} ms {what}" in outcome for what in rounds[0])
        assert topology == after or after == DENSE
    assert all_equal([values for *_, values in results])


@pytest.mark.parametrize(
    ("seconds", "rounds", "after"),
    [(0.4, 1, GATHER), (0.7, 2, GATHER), (0.9, 3, GATHER), (1.3, 2, DENSE), (2.1, 1, DENSE)],
)
def test_the_clearer_the_answer_the_shorter_the_trial(seconds, rounds, after):
    expected = [what for each in ROUNDS[:rounds] for what in (DENSE, GATHER) for _ in range(each.steps)]

    def work(rank, group):
        return timed_steps(begin(group), rank, clock, range(len(expected) + 3), takes(seconds))

    with simulated_clock(ROUNDS) as clock:
        assert run_ranks(2, work) == [expected + [after] * 3] * 2
    assert ROUNDS[0].steps == 5


@pytest.mark.parametrize("name", ["dgc", "onebit", "powersgd"])
def test_every_method_is_tried_with_what_carries_it(name, clock):
    candidates = [DENSE, GATHER, PHASES] if name in PARTITIONED else [DENSE, GATHER]

    def work(rank, group):
        parts = begin(group, LOSSY[name]())
        return timed_steps(parts, rank, clock, range(4 * EACH), takes(0.7, 0.5)), weights(parts[0])

    (seen, values), *others = run_ranks(3, work)
    expected = [what for what in candidates for _ in range(EACH)]
    assert seen == expected + [candidates[-1]] * (4 * EACH - len(expected))
    assert all(seen == other and torch.equal(values, value) for other, value in others)


def test_slow_steps_that_meet_one_candidate_decide_nothing(clock):
    """Its first take 1.2 times as long as dense ones, all that follow 0.9 times; the quickest quarter decides."""

    def work(rank, group):
        own = [1.2] * EACH + [0.9] * 100
        seconds = lambda what, sparsity: 1.0 if what == DENSE else own.pop(0)  # noqa: E731
        return timed_steps(begin(group), rank, clock, range(5 * EACH), seconds)[-1]

    assert run_ranks(2, work) == [GATHER, GATHER]


def test_the_slowest_rank_decides_for_all(clock):
    def work(rank, group):
        seconds = takes(0.5, 3.0) if rank else takes(1.5, 3.0)
        return timed_steps(begin(group), rank, clock, range(4 * EACH), seconds)[-1]

    assert run_ranks(3, work) == [DENSE] * 3


def test_the_first_rank_warns_once_where_dense_wins(clock):
    def work(rank, group):
        timed_steps(begin(group), rank, clock, range(3 * EACH), takes(2.0))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, work)
    [message] = [str(warning.message) for warning in caught if "dense" in str(warning.message)]
    assert message.startswith("DGC: Steps are dense from now on: one takes 1000.0 ms dense, 2000.0 ms all_gather")
    assert "topology='all_gather' would compress anyway" in message


def test_dense_is_tried_again_at_a_quarter_of_the_density(clock):
    """0.5 loses; 0.8 is not a quarter as dense, so it is not tried; 0.9 is, and wins; 0.95 needs no trial any more.

    The dense steps of the warm-up, and those after a trial, count for the next trial.
    """

    def work(rank, group):
        schedule = Ramp((0.5, 0.8, 0.9, 0.95), 0.95, dense=1, by="epoch")
        parts = begin(group, schedule=schedule, steps_per_epoch=2 * EACH)
        seconds = lambda what, sparsity: 1.0 if what == DENSE else 2.0 if sparsity < 0.85 else 0.5  # noqa: E731
        return timed_steps(parts, rank, clock, range(2 * EACH * 5), seconds)

    for seen in run_ranks(2, work):
        epochs = [seen[begin : begin + 2 * EACH] for begin in range(0, len(seen), 2 * EACH)]
        dense, tried, compressed = [DENSE] * 2 * EACH, [GATHER] * EACH + [DENSE] * EACH, [GATHER] * 2 * EACH
        assert epochs == [dense, tried, dense, compressed, compressed]


def test_topologies_are_tried_again_at_a_quarter_of_the_density(clock):
    """Without dense steps, which have lost already."""
    levels = [0.5] * 3 * EACH + [0.9] * 3 * EACH + [0.98] * 2 * EACH

    def work(rank, group):
        seconds = lambda what, sparsity: 9.0 if what == DENSE else 3.0 if (what == GATHER) == (sparsity < 0.7) else 1.0  # noqa: E731
        parts = begin(group, schedule=lambda epoch, step: levels[step])
        return timed_steps(parts, rank, clock, range(len(levels)), seconds)

    first, second, third = [DENSE, GATHER, PHASES], [GATHER, PHASES, GATHER], [GATHER, PHASES]
    for seen in run_ranks(3, work):
        assert seen == [what for what in [*first, *second, *third] for _ in range(EACH)]


def test_a_topology_that_sends_more_than_dense_is_not_tried(clock):
    """A quarter of all elements, from each of 8 ranks to every other, would be more than a dense ring."""

    def work(rank, group):
        schedule = lambda epoch, step: 0.75  # noqa: E731
        parts = begin(group, schedule=schedule)
        _, fixed = averaged(Table(), group, schedule=schedule, topology=GATHER)
        return timed_steps(parts, rank, clock, range(2 * EACH + 1), takes(0.1, 0.5)), fixed.begin_step().topology

    assert run_ranks(8, work) == [([DENSE] * EACH + [PHASES] * (EACH + 1), DENSE)] * 8


def test_another_optimizers_steps_with_nothing_to_compress_do_not_disturb_the_trial(clock):
    """As in manual optimization: only the parameters of one optimizer require a gradient at a time."""

    def work(rank, group):
        model = nn.ModuleDict({"actor": nn.Linear(40, 40), "temperature": nn.Linear(1, 1)})
        averager = GradientAverager(model, LOSSY["onebit"](), process_group=group, topology="auto")
        for _ in range(4 * EACH):
            for name, part in model.items():
                for other in model:
                    model[other].requires_grad_(other == name)
                part(torch.ones(part.in_features)).sum().backward()
                clock.now += 1.0
                averager.average()
                averager.commit()
        return averager.autotune.choice

    assert run_ranks(2, work) == [DENSE] * 2


@pytest.mark.parametrize(("world", "seconds"), [(2, 2.0), (3, 0.9)])
def test_a_resumed_run_decides_as_the_whole_one(world, seconds, clock):
    """Wherever it was stopped: the states that runs resume from are saved on the way of the whole one."""
    stops, end = [3, EACH + 2, 2 * EACH + 5, 3 * EACH + 2], 2 * EACH * world + 3
    after = GATHER if seconds < 1 else DENSE

    def work(rank, group):
        straight, states = begin(group), []
        for start, stop in pairwise([0, *stops, end]):
            timed_steps(straight, rank, clock, range(start, stop), takes(seconds, 1.05))
            states.append(deepcopy([part.state_dict() for part in straight]))
        for stop, state in zip(stops, states, strict=False):
            resumed = begin(group)
            for part, saved in zip(resumed, state, strict=True):
                part.load_state_dict(saved)
            clock.now += 1e6  # the machine was off for a while
            timed_steps(resumed, rank, clock, range(stop, stop + end), takes(seconds, 1.05))
            assert resumed[2].autotune.choice == straight[2].autotune.choice == after

    run_ranks(world, work)


def test_alone_or_dense_there_is_nothing_to_try():
    assert begin(None)[2].autotune is None

    def work(rank, group):
        averager = GradientAverager(Table(), "fp16", process_group=group, topology="auto")
        return averager.autotune, averager.summary()["topology"], begin(group, "none")[2].autotune

    assert run_ranks(2, work) == [(None, "all_reduce", None)] * 2


def test_all_gather_compresses_from_the_first_step():
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, topology="all_gather")
        train(model, optimizer, averager, rank, 1, prescribed_loss)
        return averager.stats.sparsity

    assert run_ranks(2, work) == [0.9, 0.9]


@pytest.mark.filterwarnings("ignore:.*Steps are int8")
@pytest.mark.parametrize(("seconds", "after"), [(0.5, GATHER), (2.0, "int8")])
def test_with_a_fallback_steps_that_are_not_compressed_travel_in_8_bits(seconds, after, clock):
    """But not those of the warm-up, whose times then say nothing about the trial."""
    takes = {DENSE: 1.0, "int8": 1.0, GATHER: seconds}

    def work(rank, group):
        parts = begin(group, schedule=lambda epoch, step: 0.9 * (step >= 3), fallback="int8")
        seen, sent = timed_steps(parts, rank, clock, range(3 + EACH), lambda what, _: takes[what]), parts[2].stats
        seen += timed_steps(parts, rank, clock, range(3 + EACH, 6 + 2 * EACH), lambda what, _: takes[what])
        return seen, sent.ratio, parts[2].summary()["topology"], weights(parts[0])

    first, second = run_ranks(2, work)
    assert first[0] == [DENSE] * 3 + ["int8"] * EACH + [GATHER] * EACH + [after] * 3
    assert first[1] > 1.5 and first[2] == GATHER  # two ranks send each other everything, in 8 bits too
    assert first[:3] == second[:3] and torch.equal(first[3], second[3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fallback": "int4"}, "fallback: got 'int4', allowed: 'none', 'int8', 'eden1', 'eden2', 'eden3', 'eden4'"),
        (
            {"fallback": "int8", "topology": "all_gather"},
            "fallback with topology='all_gather': got 'int8', allowed: 'none'",
        ),
        ({"fallback": "int8", "compressor": "fp16"}, "fallback with FP16: got 'int8', allowed: 'none'"),
    ],
)
def test_a_fallback_that_can_have_no_effect_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        given = {"compressor": "dgc", "topology": "auto", **options}
        GradientAverager(Table(), optimizer=torch.optim.SGD(Table().parameters()), **given)
