"""The virtual clock of benchmarks.accuracy."""

from itertools import islice

import pytest
from torch import nn

from benchmarks import accuracy
from benchmarks.accuracy import UNEQUAL, Workers, asynchronous, turns

PUSHES = 4 * 22


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(accuracy, "EPOCHS", 1)
    monkeypatch.setattr(accuracy, "resnet18", lambda **_: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))


def test_a_fast_worker_steps_four_times_as_often():
    assert list(islice(turns((0.5, 1.0)), 5)) == [(0.5, 0), (1.0, 0), (1.0, 1), (1.5, 0), (2.0, 0)]


def test_a_run_is_the_same_every_time():
    case = Workers(push="dgc:sparsity=0.9;min_elements=64", seconds=UNEQUAL)
    one, other = asynchronous(case, 0), asynchronous(case, 0)
    assert one == other and one.percent > 50
    assert one.seconds == pytest.approx(PUSHES / 7, abs=1)


def test_workers_that_take_turns_are_three_pushes_behind():
    outcome = asynchronous(Workers(push="none"), 0)
    assert outcome.seconds == PUSHES / 4
    assert outcome.staleness == pytest.approx((0 + 1 + 2 + 3 * (PUSHES - 3)) / PUSHES)


def test_gradients_have_the_age_that_is_asked_for():
    outcome = asynchronous(Workers(push="none", age=7), 0)
    assert outcome.staleness == pytest.approx((sum(range(7)) + 7 * (PUSHES - 7)) / PUSHES)
