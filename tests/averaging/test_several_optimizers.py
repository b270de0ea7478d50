"""Several optimizers that step in turns: each parameter's error feedback is the same as with one optimizer for all."""

import warnings

import pytest
import torch

from lightning_gradcomp import GradientDropping, OneBit
from lightning_gradcomp.averaging import GradientAverager
from tests.averaging.workers import SGD, Table, bowl_loss, weights
from tests.threads import run_ranks

QUICK = {"min_elements": 50, "warmup_epochs": 0}
METHODS = {"onebit": OneBit(**QUICK), "sparse": GradientDropping(sparsity=0.8, scope="tensor", **QUICK)}


def set_up(group, compressor, turns, topology):
    model = Table()
    parts = [[model.kernel, model.small], [model.matrix, model.bias]] if turns else [list(model.parameters())]
    optimizers = [torch.optim.SGD(part, **SGD) for part in parts]
    how = {"optimizers": optimizers, "topology": topology, "process_group": group}
    return model, optimizers, GradientAverager(model, compressor, **how)


def train(model, optimizers, averager, rank, steps):
    for step in steps:
        model.zero_grad()
        bowl_loss(model, rank, step).backward()
        for optimizer in optimizers:
            averager.average(optimizer=optimizer)
            optimizer.step()


@pytest.mark.parametrize("compressor", METHODS.values(), ids=METHODS)
def test_turns_are_one_step(compressor):
    def work(rank, group, turns):
        parts = set_up(group, compressor, turns, "all_gather")
        train(*parts, rank, range(6))
        return weights(parts[0])

    one, turns = (run_ranks(2, lambda rank, group, turns=turns: work(rank, group, turns)) for turns in (False, True))
    assert torch.equal(torch.stack(one), torch.stack(turns))


@pytest.mark.parametrize("topology", ["all_gather", "two_phase"])
def test_a_state_saved_between_turns_holds_all_parameters(topology):
    rounds_dense = OneBit(**QUICK, dense_values="int8")

    def work(rank, group):
        model, optimizers, averager = set_up(group, rounds_dense, True, topology)
        train(model, optimizers, averager, rank, range(3))
        train(model, optimizers[:1], averager, rank, range(3, 4))
        kept = averager.state_dict()
        other = set_up(group, rounds_dense, True, topology)[2]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other.load_state_dict(kept)
        return kept["memory"], other.state_dict()["memory"]

    for kept, loaded in run_ranks(2, work):
        assert set(kept["residual"]) == {"kernel", "matrix"}
        assert set(kept["dense_residual"]) == {"small", "bias"}
        if topology == "all_gather":
            assert all(torch.equal(kept[kind][name], loaded[kind][name]) for kind in kept for name in kept[kind])
