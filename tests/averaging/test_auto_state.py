"""topology="auto" keeps the laws of test_matrix.py through its trial: resumed runs, other worlds, frozen parameters."""

from functools import partial

import pytest

from lightning_gradcomp.averaging import mean_state
from tests.averaging.cells import Cell, Ledger, differences, end_of, load, stored
from tests.averaging.methods import LOSSY
from tests.averaging.simulated_clock import EACH, simulated_clock, timed_steps
from tests.averaging.workers import all_equal
from tests.threads import run_ranks

TRIED = {label: LOSSY[label] for label in ("dgc", "onebit", "powersgd")}
"""A trial takes many steps; test_autotune.py tries every method once."""
SECONDS = {"dense": 3.0, "all_gather": 2.0, "two_phase": 1.0}
"""Of a step, for the trial of "auto": what comes later is quicker."""
WORLDS = (4, 2, 3, 2)


methods = pytest.mark.parametrize("make", TRIED.values(), ids=TRIED)


@pytest.fixture(autouse=True)
def clock():
    with simulated_clock() as clock:
        yield clock


def begin(group, make, optimizer="sgd"):
    return Cell(make, "auto", optimizer=optimizer).begin(group, schedule=lambda epoch, step: 0.9)


def go(parts, rank, clock, steps, step_of=lambda averager: averager.step()):
    return timed_steps(parts, rank, clock, steps, lambda what, sparsity: SECONDS.get(what, 1.0), step_of)


@methods
def test_a_run_resumed_after_its_trial_is_bit_identical_and_one_resumed_in_it_repeats_it(make, clock):
    trial = 3 * EACH
    end = trial + 6

    def work(rank, group):
        straight, stopped = begin(group, make), begin(group, make)
        seen = go(straight, rank, clock, range(end))
        go(stopped, rank, clock, range(EACH + 3))
        repeated, resumed = begin(group, make), begin(group, make)
        load(repeated, stored(stopped))
        assert go(repeated, rank, clock, range(EACH + 3, EACH + 3 + end)) == seen
        go(stopped, rank, clock, range(EACH + 3, trial + 3))
        load(resumed, stored(stopped))
        assert go(resumed, rank, clock, range(trial + 3, end)) == seen[-3:]
        assert not differences(end_of(resumed), end_of(straight))

    run_ranks(3, work)


@methods
def test_nothing_is_lost_from_world_to_world(make, clock):
    length = 2 * EACH + 3  # it ends among partitions, with two ranks after its trial

    def work(rank, group, state, steps):
        ledger = Ledger(begin(group, make, "plain"))
        if state:
            ledger.averager.load_state_dict(state)
        go(ledger.parts, rank, clock, steps, lambda _: ledger.average())
        return ledger.had, ledger.came, *ledger.left(), ledger.averager.state_dict()

    there_was, applied, state = 0, 0, None
    for number, world in enumerate(WORLDS):
        steps = range(number * length, (number + 1) * length)
        had, came, own, owners, states = zip(*run_ranks(world, partial(work, state=state, steps=steps)), strict=True)
        assert all_equal(came)
        there_was, applied = there_was + sum(had) / world, applied + came[0]
        left = sum(own) / world + sum(owners)
        assert left.norm() > 0.01 * there_was.norm(), "nothing is left out, so nothing could be lost"
        assert float((there_was - applied - left).norm() / there_was.norm()) <= 1e-6
        state = mean_state(states)
        assert state["steps"] == (number + 1) * length


def test_a_trials_outcome_is_for_as_many_ranks(clock):
    """Another world tries anew, also from a mean that was made by hand and has all keys."""

    def tried(rank, group):
        parts = begin(group, TRIED["dgc"])
        go(parts, rank, clock, range(2 * EACH + 3))
        assert not parts[2].autotune.measuring
        return parts[2].state_dict()

    states = run_ranks(2, tried)
    memory = {
        kind: {name: (part + states[1]["memory"][kind][name]) / 2 for name, part in parts.items()}
        for kind, parts in states[0]["memory"].items()
    }
    by_hand = {**states[0], "memory": memory}

    def resumed(rank, group, state):
        parts = begin(group, TRIED["dgc"])
        parts[2].load_state_dict(state)
        return go(parts, rank, clock, range(EACH + 1))

    assert run_ranks(2, partial(resumed, state=by_hand)) == [["all_gather"] * (EACH + 1)] * 2
    trial = ["dense"] * EACH + ["all_gather"]
    for state in (by_hand, mean_state(states)):
        assert run_ranks(3, partial(resumed, state=state)) == [trial] * 3


@methods
def test_nothing_is_lost_when_layers_are_frozen_and_unfrozen(make, clock):
    trains = {"kernel": lambda step: not 4 <= step < 7, "matrix": lambda step: step >= 2, "bias": lambda step: step > 3}

    def work(rank, group):
        ledger = Ledger(begin(group, make, "plain"))
        for step in range(2 * EACH + 10):
            for name, when in trains.items():  # again when the trial has come to compressed steps
                ledger.model.get_parameter(name).requires_grad_(when(step if step < EACH else (step - EACH) % 10))
            go(ledger.parts, rank, clock, [step], lambda _: ledger.average())
        return ledger.had, ledger.came, *ledger.left()

    had, came, own, owners = zip(*run_ranks(3, work), strict=True)
    assert all_equal(came)
    wanted, left = sum(had) / 3, sum(own) / 3 + sum(owners)
    assert left.norm() > 0
    assert float((wanted - came[0] - left).norm() / wanted.norm()) <= 1e-6
