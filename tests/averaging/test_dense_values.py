"""What is not compressed may travel in fewer bits as well, and what that rounds off is remembered."""

import pytest
import torch

from lightning_gradcomp.averaging import mean_state
from lightning_gradcomp.compressors import DGC, OneBit
from tests.averaging.methods import quick
from tests.averaging.workers import Table, averaged, backward, prescribed_loss
from tests.threads import run_ranks

FORMATS = ["bf16", "fp16", "int8"]
DENSE = ("small", "bias")
"""The parameters of `Table` that are not compressed."""


def ledgers(world, compressor, steps=8, schedule=lambda epoch, step: 0.9):
    """For every rank: sum of its dense gradients, sum of their averages, what it remembers at the end, its averager."""

    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, compressor(), schedule, momentum=0.0)
        own, applied = {}, {}
        for step in range(steps):
            backward(model, optimizer, rank, step, prescribed_loss)
            named = {name: p for name, p in model.named_parameters() if name in DENSE}
            own = {name: own.get(name, 0) + p.grad.double() for name, p in named.items()}
            averager.average()
            averager.commit()
            applied = {name: applied.get(name, 0) + p.grad.double() for name, p in named.items()}
        return own, applied, averager.state_dict(), averager.stats.bytes_sent

    return run_ranks(world, work)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("values", FORMATS)
def test_applied_plus_mean_residual_is_all_gradients(values, world):
    ranks = ledgers(world, lambda: quick(OneBit, dense_values=values))
    remembered = mean_state([state for _, _, state, _ in ranks])["memory"]["dense_residual"]
    for name in DENSE:
        there_was = sum(own[name] for own, _, _, _ in ranks) / world
        applied = ranks[0][1][name]
        assert remembered[name].abs().max() > 0, "nothing was rounded, so nothing could be lost"
        torch.testing.assert_close(applied + remembered[name].double(), there_was, rtol=1e-6, atol=1e-6)


def test_the_message_is_as_much_shorter():
    elements = sum(Table().get_parameter(name).numel() for name in DENSE)
    [(_, _, _, whole), _] = ledgers(2, lambda: quick(DGC), 1)
    [(_, _, _, half), _] = ledgers(2, lambda: quick(DGC, dense_values="bf16"), 1)
    assert 2 * elements - 4 <= whole - half <= 2 * elements + 4
