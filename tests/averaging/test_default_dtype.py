"""A script's default dtype has no effect: the same weights, to the bit, as with torch's own."""

from copy import deepcopy

import pytest
import torch

from lightning_gradcomp import DelayedAverager
from lightning_gradcomp.averaging import GradientAverager
from tests.averaging.cells import FEW
from tests.averaging.methods import REGISTERED, with_defaults
from tests.averaging.workers import Table, default_dtype, slopes, weights
from tests.threads import run_ranks

MODEL, STEPS, WORLD = Table(), 4, 2
GRADIENTS = [[slopes(rank, step) for step in range(STEPS)] for rank in range(WORLD)]
"""Made while the default is fp32: a module makes its parameters of the default dtype."""
OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}
METHODS = with_defaults(REGISTERED)
CASES = {
    **{f"{label} sgd": (make, "sgd", "all_gather", torch.bfloat16) for label, make in REGISTERED.items()},
    **{f"{label} sgd, fp64": (METHODS[label], "sgd", "all_gather", torch.float64) for label in FEW},
    **{
        f"{label} adamw": (METHODS[label], "adamw", "all_gather", torch.bfloat16) for label in ("dgc", "onebit", "none")
    },
    **{f"{label} two_phase": (METHODS[label], "sgd", "two_phase", torch.bfloat16) for label in FEW},
}
OTHERS = pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)


def step(model, rank, number, averager):
    for parameter, gradient in zip(model.parameters(), GRADIENTS[rank][number], strict=True):
        parameter.grad = gradient.clone()
    averager.step()


def same_as_by_default(dtype, work):
    with default_dtype(dtype):
        found = run_ranks(WORLD, work)
    expected = run_ranks(WORLD, work)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert not torch.equal(found[0], weights(MODEL))


@pytest.mark.parametrize(("make", "optimizer", "topology", "dtype"), CASES.values(), ids=CASES)
def test_steps(make, optimizer, topology, dtype):
    """With a checkpoint in the middle."""

    def work(rank, group):
        model = deepcopy(MODEL)
        stepped = OPTIMIZERS[optimizer](model)
        averager = GradientAverager(model, make(), optimizer=stepped, process_group=group, topology=topology)
        for number in range(STEPS):
            if number == 2:
                averager.load_state_dict(averager.state_dict())
            step(model, rank, number, averager)
        return weights(model)

    same_as_by_default(dtype, work)


@OTHERS
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", [{"delay": 1}, {"delay": 0, "error_decay": 0.9, "compressor": REGISTERED["onebit"]()}])
def test_delayed_averages(rule, optimizer, dtype):
    def work(rank, group):
        model = deepcopy(MODEL)
        averager = DelayedAverager(model, OPTIMIZERS[optimizer](model), period=2, process_group=group, **rule)
        for number in range(3):
            step(model, rank, number, averager)
        averager.load_state_dict(averager.state_dict())
        step(model, rank, 3, averager)
        averager.drain()
        return weights(model)

    same_as_by_default(dtype, work)
