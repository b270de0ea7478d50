"""Stopping and going on is the same as not stopping."""

import io
from copy import deepcopy

import pytest
import torch

from tests.averaging.methods import EVERY, LOSSY
from tests.averaging.workers import Table, all_equal, averaged, dgc, prescribed_loss, same, train, weights
from tests.threads import run_ranks


def schedule(epoch, step):
    return 0.0 if step < 5 or step >= 15 else 0.9


def stored(*parts):
    """What `torch.load` makes of a checkpoint of these, without running code from it."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_saved_state_does_not_change_while_training_goes_on():
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group)
        train(model, optimizer, averager, rank, 3, prescribed_loss)
        state = averager.state_dict()
        before = stored(averager)[0]
        train(model, optimizer, averager, rank, 3, prescribed_loss)
        assert same(state["memory"], before["memory"])
        assert not same(averager.state_dict()["memory"], before["memory"])

    run_ranks(2, work)


SHAPE = r"state of 'matrix': got shape \(3, 3\), allowed: \(12, 25\)"
KIND = (
    r"the state of GradientAverager: got 'a state of another method, with .*', allowed: .*{}.*, which this compressor"
)
WHOLE = r"the state of GradientAverager: got 'a {} without {}', allowed: what GradientAverager.state_dict\(\) returned"


def without(*keys):
    return lambda state, optimizer: {key: value for key, value in state.items() if key not in keys}


def with_another_shape(state, optimizer):
    kind = next(iter(state["memory"]))
    return {**state, "memory": {**state["memory"], kind: {**state["memory"][kind], "matrix": torch.zeros(3, 3)}}}


def of(name):
    """Another method's state."""

    return lambda state, optimizer: {**averaged(Table(), None, LOSSY[name]())[1].state_dict(), "steps": 99}


REFUSED = {
    "another shape": ("dgc", with_another_shape, SHAPE),
    "onebit's for dgc": ("dgc", of("onebit"), KIND.format("velocity, momentum")),
    "dgc's for onebit": ("onebit", of("dgc"), KIND.format("residual")),
    "onebit's for powersgd": ("powersgd", of("onebit"), KIND.format("query")),
    "dgc's for fp16": ("fp16", without("steps"), WHOLE.format("dict", "steps")),
    "the optimizer's": (
        "dgc",
        lambda state, optimizer: optimizer.state_dict(),
        WHOLE.format("dict", "autotune, .*, workers"),
    ),
    "a list": ("dgc", lambda state, optimizer: [state], WHOLE.format("list", "steps, memory, .*")),
    "nothing": ("onebit", lambda state, optimizer: None, WHOLE.format("NoneType", "steps, memory, .*")),
    "parts": ("onebit", without("workers", "trained"), WHOLE.format("dict", "trained, workers")),
}


REFUSED = {f"all_gather-{label}": ("all_gather", *case) for label, case in REFUSED.items()} | {
    f"two_phase-{label}": ("two_phase", *REFUSED[label]) for label in ("another shape", "onebit's for dgc")
}


@pytest.mark.parametrize(("topology", "name", "spoil", "message"), REFUSED.values(), ids=REFUSED)
def test_other_states_are_refused_and_nothing_is_lost(topology, name, spoil, message):
    """The run goes on as if nobody had tried to load them."""

    def work(rank, group):
        runs = []
        for refused in (True, False):
            model = Table()
            optimizer, averager = averaged(model, group, EVERY[name](), topology=topology)
            train(model, optimizer, averager, rank, 3, prescribed_loss)
            if refused:
                before = deepcopy(averager.state_dict())
                with pytest.raises(ValueError, match=message):
                    averager.load_state_dict(spoil(averager.state_dict(), optimizer))
                after = averager.state_dict()
                assert same(after.pop("memory"), before.pop("memory")) and after == before
            train(model, optimizer, averager, rank, range(3, 6), prescribed_loss)
            runs.append(weights(model))
        return torch.equal(*runs)

    assert all(run_ranks(2, work))


def test_a_loaded_state_replaces_what_was_there():
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group)
        train(model, optimizer, averager, rank, 2, prescribed_loss)
        state = averager.state_dict()
        train(model, optimizer, averager, rank, range(2, 6), prescribed_loss)
        averager.load_state_dict(state)
        assert same(averager.state_dict()["memory"], state["memory"])
        train(model, optimizer, averager, rank, range(6, 8), prescribed_loss)
        return weights(model)

    assert all_equal(run_ranks(2, work))


def test_plain_sgd_goes_on_after_a_return_to_dense():
    """The momentum is where torch keeps it whenever training is dense, so either may go on from the other's state."""

    def ours(rank, group, steps):
        model = Table()
        optimizer, averager = averaged(model, group, dgc(momentum_masking=False), schedule)
        train(model, optimizer, averager, rank, steps, prescribed_loss)
        return model, optimizer

    def handed_over(rank, group):
        source, source_optimizer = ours(rank, group, 17)
        model = Table()
        optimizer, averager = averaged(model, group, "none")
        for part, state in zip((model, optimizer), stored(source, source_optimizer), strict=True):
            part.load_state_dict(state)
        train(model, optimizer, averager, rank, range(17, 20), prescribed_loss)
        return weights(model)

    def straight(rank, group):
        return weights(ours(rank, group, 20)[0])

    got, expected = run_ranks(2, handed_over), run_ranks(2, straight)
    assert all_equal(got)
    assert torch.equal(got[0], expected[0])
