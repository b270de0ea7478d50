"""Weight decay is as strong in compressed steps as in the optimizer's own."""

from functools import partial

import pytest
import torch

from lightning_gradcomp.averaging import GradientAverager, topology
from tests.averaging.workers import backward, conv_net, dgc, weights
from tests.threads import run_ranks

STEPS = 10
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
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
        return weights(model)

    model = conv_net()
    optimizer = make(model.parameters())
    for step in range(STEPS):
        backward(model, optimizer, 0, step)
        optimizer.step()
    for got in run_ranks(2, work):
        assert float((got - weights(model)).abs().max()) <= 1e-6
