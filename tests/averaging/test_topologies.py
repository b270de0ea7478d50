"""Laws about state with every topology: resumed runs, worlds of another size, frozen parameters."""

from copy import deepcopy
from functools import partial

import pytest
import torch

from lightning_gradcomp.averaging import mean_state
from lightning_gradcomp.averaging.checkpoint_state import PARTITION
from lightning_gradcomp.compressors.layout import Layout
from tests.averaging.laws import KEPT, LOSSY, PARTITIONED, REMEMBERING, with_defaults
from tests.averaging.simulated_clock import EACH, simulated_clock, timed_steps
from tests.averaging.workers import Table, all_equal, averaged, same, weights
from tests.threads import run_ranks

OTHERS = ("two_phase", "server", "auto")
"""All but "all_gather", with which test_laws.py has every method."""
TRIED = ("dgc", "onebit", "powersgd")
"""The methods for "auto", whose trial takes many steps; test_autotune.py tries every method once."""
SECONDS = {"dense": 3.0, "all_gather": 2.0, "two_phase": 1.0}
"""Of a step, for the trial of "auto": what comes later is quicker."""
WORLDS = (4, 2, 3, 2)


def on_topologies(makes, topologies=OTHERS):
    """Every method with its default options, by each of these topologies that works with it."""
    works = {"all_gather": makes, "two_phase": PARTITIONED, "server": PARTITIONED, "auto": TRIED}
    cases = {
        f"{topology}-{label}": (topology, make)
        for topology in topologies
        for label, make in with_defaults(makes).items()
        if label in works[topology]
    }
    return pytest.mark.parametrize(("topology", "make"), cases.values(), ids=cases)


@pytest.fixture(autouse=True)
def clock():
    with simulated_clock() as clock:
        yield clock


def begin(group, topology, make, **options):
    model = Table()
    return model, *averaged(model, group, make(), topology=topology, **options)


def go(parts, rank, clock, steps, step_of=lambda averager: averager.step()):
    return timed_steps(parts, rank, clock, steps, lambda what, sparsity: SECONDS.get(what, 1.0), step_of)


class Ledger:
    """Gradients that a rank had, the averages that came, and what it remembers, without momentum: fp64 [n] each."""

    def __init__(self, group, topology, make):
        self.parts = begin(group, topology, make, momentum=0.0)
        self.had = self.came = 0

    def flat(self, tensors):
        layout = Layout.of(self.parts[0].named_parameters())
        known = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        return layout.join(known, torch.device("cpu")).double()

    def gradients(self):
        return self.flat({name: p.grad for name, p in self.parts[0].named_parameters()})

    def average(self, averager):
        self.had = self.had + self.gradients()
        averager.average()
        averager.commit()
        self.came = self.came + self.gradients()

    def remembered(self):
        """As a worker, and as an owner."""
        memory = self.parts[2].state_dict()["memory"]
        own = [self.flat(parts) for kind, parts in memory.items() if kind.removeprefix("dense_") in KEPT]
        return sum(own), self.flat(memory.get(PARTITION, {}))


@on_topologies(LOSSY)
def test_a_resumed_run_is_the_straight_run_to_the_bit(topology, make, clock):
    """Stopped once; "auto" in the trial of each candidate, and after it."""
    stops, end = ([3, EACH + 3, 2 * EACH + 3, 3 * EACH + 3], 3 * EACH + 6) if topology == "auto" else ([3], 6)

    def work(rank, group):
        straight, stopped = begin(group, topology, make), begin(group, topology, make)
        seen, done = go(straight, rank, clock, range(end)), 0
        for stop in stops:
            go(stopped, rank, clock, range(done, stop))
            resumed = begin(group, topology, make)
            for part, other in zip(resumed, stopped, strict=True):
                part.load_state_dict(deepcopy(other.state_dict()))
            did = go(resumed, rank, clock, range(stop, end))
            assert did[-3:] == seen[-3:]
            assert torch.equal(weights(resumed[0]), weights(straight[0])), f"stopped at {stop}"
            assert same(resumed[2].state_dict()["memory"], straight[2].state_dict()["memory"]), f"stopped at {stop}"
            done = stop

    run_ranks(3, work)


@on_topologies(REMEMBERING, ("all_gather", *OTHERS))
def test_nothing_is_lost_from_world_to_world(topology, make, clock):
    """Applied + mean of the workers' states + shards' residuals = mean of all gradients, on 4, 2, 3 and 2 ranks."""
    length = 2 * EACH + 3 if topology == "auto" else 3  # "auto" ends among shards, with two ranks after its trial

    def work(rank, group, state, steps):
        ledger = Ledger(group, topology, make)
        if state:
            ledger.parts[2].load_state_dict(state)
        go(ledger.parts, rank, clock, steps, ledger.average)
        return ledger.had, ledger.came, *ledger.remembered(), ledger.parts[2].state_dict()

    there_was, applied, state = 0, 0, None
    for number, world in enumerate(WORLDS):
        steps = range(number * length, (number + 1) * length)
        had, came, own, shards, states = zip(*run_ranks(world, partial(work, state=state, steps=steps)), strict=True)
        assert all_equal(came)
        there_was, applied = there_was + sum(had) / world, applied + came[0]
        left = sum(own) / world + sum(shards)
        assert left.norm() > 0.01 * there_was.norm(), "nothing is left out, so nothing could be lost"
        assert float((there_was - applied - left).norm() / there_was.norm()) <= 1e-6
        state = mean_state(states)
        assert state["steps"] == (number + 1) * length


def test_a_trials_outcome_is_for_as_many_ranks(clock):
    """Another world tries anew, also from a mean that was made by hand and has all keys."""

    def tried(rank, group):
        parts = begin(group, "auto", LOSSY["dgc"])
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
        parts = begin(group, "auto", LOSSY["dgc"])
        parts[2].load_state_dict(state)
        return go(parts, rank, clock, range(EACH + 1))

    assert run_ranks(2, partial(resumed, state=by_hand)) == [["all_gather"] * (EACH + 1)] * 2
    trial = ["dense"] * EACH + ["all_gather"]
    for state in (by_hand, mean_state(states)):
        assert run_ranks(3, partial(resumed, state=state)) == [trial] * 3
    without_rounds = {key: value for key, value in by_hand["autotune"].items() if key != "round"}  # version 0.1.0
    assert run_ranks(2, partial(resumed, state={**by_hand, "autotune": without_rounds})) == [trial] * 2


@on_topologies(LOSSY)
def test_nothing_is_lost_when_layers_are_frozen_and_unfrozen(topology, make, clock):
    """What is remembered of a frozen layer is kept until it trains; shards are cut anew, and replicas stay equal."""
    late = EACH if topology == "auto" else 0  # when the trial has come to compressed steps
    trains = {"kernel": lambda step: not 4 <= step < 7, "matrix": lambda step: step >= 2, "bias": lambda step: step > 3}

    def work(rank, group):
        ledger = Ledger(group, topology, make)
        model, _, averager = ledger.parts
        for step in range(2 * late + 10):
            for name, when in trains.items():
                model.get_parameter(name).requires_grad_(when(step if step < late else (step - late) % 10))
            frozen, before = model.kernel.detach().clone(), averager.state_dict()["memory"]
            go(ledger.parts, rank, clock, [step], ledger.average)
            after = averager.state_dict()["memory"]
            if not model.kernel.requires_grad and averager.decision.topology != "dense":
                assert torch.equal(model.kernel, frozen)
                owned = {kind for kind in before if "kernel" in before[kind] and "kernel" in before.get(PARTITION, {})}
                for kind in before.keys() - owned:  # or the worker has taken over what the owner remembered
                    assert "kernel" not in before[kind] or torch.equal(after[kind]["kernel"], before[kind]["kernel"])
        own = ledger.remembered() if make in REMEMBERING.values() else None
        return ledger.had, ledger.came, own

    had, came, left = zip(*run_ranks(3, work), strict=True)
    assert all_equal(came)
    if left[0]:
        own, shards = zip(*left, strict=True)
        owed = sum(had) / 3 - came[0]
        assert owed.norm() > 0
        assert float((owed - sum(own) / 3 - sum(shards)).norm() / (sum(had) / 3).norm()) <= 1e-6
