"""What is remembered, handed on: to a world of another size, and to a model that is not quite the same."""

import weakref
from functools import partial

import pytest
import torch

from lightning_gradcomp.averaging import GradientAverager, mean_state
from lightning_gradcomp.compressors import TernGrad
from tests.averaging.methods import REMEMBERING, quick, with_defaults
from tests.averaging.workers import Table, averaged, prescribed_loss, same, train
from tests.threads import run_ranks

METHODS = with_defaults(REMEMBERING)
remembering = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
feeding_back = partial(quick, TernGrad, error_feedback=True)


# Worlds of other sizes


def test_states_are_read_one_by_one():
    """Those of many ranks would not fit into memory together."""
    seen = []

    def states():
        for number in range(4):
            assert sum(part() is not None for part in seen) <= 1
            part = torch.full((3,), float(number))
            seen.append(weakref.ref(part))
            yield {"steps": 7, "memory": {"residual": {"w": part}}, "shapes": {"w": (3,)}}
            del part

    state = mean_state(states())
    assert (state["steps"], state["shapes"], len(seen)) == (7, {"w": (3,)}, 4)
    assert state["memory"]["residual"]["w"].tolist() == [1.5, 1.5, 1.5]


def test_a_name_that_some_ranks_lack_counts_as_0_there():
    parts = [{"a": torch.tensor([6.0])}, {"a": torch.tensor([3.0]), "b": torch.tensor([3.0])}, {}]
    state = mean_state({"steps": 1, "memory": {"accumulated": part}, "shapes": {}} for part in parts)
    assert state["memory"] == {"accumulated": {"a": torch.tensor([3.0]), "b": torch.tensor([1.0])}}


# Models and options that are not quite the same


def state_of(make, model=Table):
    """A state with something in it, as rank 0 of two saves it."""

    def work(rank, group):
        net = model()
        optimizer, averager = averaged(net, group, make())
        train(net, optimizer, averager, rank, 2, prescribed_loss)
        return averager.state_dict()

    return run_ranks(2, work)[0]


def alone(make, model=Table):
    """An averager in a world of one, which loads as any other does."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return GradientAverager(net, make(), optimizer=optimizer)


class Renamed(Table):
    """A Table whose matrix has another name; calls to it look the same."""

    def __init__(self):
        super().__init__()
        self.renamed = self.matrix
        del self.matrix

    def forward(self, kernel, matrix, small, bias):
        return super().forward(kernel, small, bias, matrix)


@remembering
def test_a_renamed_parameter_is_named_both_as_gone_and_as_new(make):
    averager, state = alone(make, Renamed), state_of(make)
    with pytest.warns(UserWarning) as warned:
        averager.load_state_dict(state)
    assert sorted(str(warning.message) for warning in warned) == [
        "The checkpoint has no state of 'renamed': it did not have these parameters.",
        "The checkpoint's state of 'matrix' is lost: the model has no such parameters.",
    ]
    loaded = averager.state_dict()["memory"]
    for kind, parts in state["memory"].items():
        assert all(torch.equal(loaded[kind][name], parts[name]) for name in parts if name != "matrix")
        assert "matrix" not in loaded[kind]


@remembering
def test_another_shape_is_refused_and_nothing_changes(make):
    """Whether its shape is said to be another one, or a tensor of it has another one."""
    averager, state = alone(make), state_of(make)
    averager.load_state_dict(state)
    before = averager.state_dict()
    spoilt = [{**state, "steps": 99, "shapes": {**state["shapes"], "matrix": (5, 7)}}]
    for kind, parts in state["memory"].items():
        if parts:
            memory = {key: {name: part + 1 for name, part in those.items()} for key, those in state["memory"].items()}
            memory[kind][next(iter(parts))] = torch.zeros(5, 7)
            spoilt.append({**state, "steps": 99, "memory": memory})
    for other in spoilt:
        with pytest.raises(ValueError, match=r"(state|query) of '\w+': got shape \(5, 7\), allowed: \(\d"):
            averager.load_state_dict(other)
        assert averager.steps == before["steps"]
        assert same(averager.state_dict()["memory"], before["memory"])


def test_what_the_options_of_now_do_not_keep_is_named():
    with pytest.warns(UserWarning, match="'residual' is lost: the current options do not use it"):
        alone(partial(quick, TernGrad)).load_state_dict(state_of(feeding_back))
