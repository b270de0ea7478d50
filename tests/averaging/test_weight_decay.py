"""Compressed steps that send everything are the optimizer's own, weight decay and moments included."""

from functools import partial

import pytest
import torch

from lightning_gradcomp.averaging import GradientAverager, topology
from tests.averaging.workers import backward, conv_net, dgc, weights
from tests.threads import run_ranks

STEPS = 20
ADAM = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, **ADAM),
    "adamw": partial(torch.optim.AdamW, **ADAM),
    "adam, foreach": partial(torch.optim.Adam, foreach=True, **ADAM),
    "adamw, fused": partial(torch.optim.AdamW, fused=True, **ADAM),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_compressed_steps_that_send_everything_are_the_optimizers(make, monkeypatch):
    """Such a step costs more than a dense one, and is dense otherwise. All ranks have the same gradients."""
    monkeypatch.setattr(topology, "traffic", lambda *of: 0)

    def work(rank, group):
        model = conv_net()
        optimizer = make(model.parameters())
        compressor = dgc(sparsity=1e-9, momentum_masking=False)
        averager = GradientAverager(model, compressor, optimizer=optimizer, process_group=group)
        for step in range(STEPS):
            assert averager.begin_step().compressor
            backward(model, optimizer, 0, step)
            averager.step()
        return weights(model), optimizer.state_dict()["state"]

    model = conv_net()
    optimizer = make(model.parameters())
    for step in range(STEPS):
        backward(model, optimizer, 0, step)
        optimizer.step()
    for got, state in run_ranks(2, work):
        assert float((got - weights(model)).abs().max()) <= 1e-6
        for index, moments in optimizer.state_dict()["state"].items() if "exp_avg" in state[0] else ():
            assert state[index].keys() == moments.keys()
            for kind, moment in moments.items():
                torch.testing.assert_close(state[index][kind].float(), moment.float(), rtol=1e-4, atol=1e-6)
