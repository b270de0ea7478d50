"""Options and models that are refused."""

import pytest
import torch
from torch import nn

import lightning_gradcomp as lgc
from lightning_gradcomp import DelayedAverager, Nesterov
from tests.averaging.workers import Table
from tests.local_sgd.training import run_ranks, set_up


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"period": 4, "delay": 5}, r"delay: got 5, allowed: 0 to 4"),
        ({"period": 0, "delay": 0}, r"period: got 0, allowed: a whole number of steps, 1 or more"),
        ({"delay": "soon"}, r"delay: got 'soon', allowed: 0 to 8.*'auto'"),
        ({"compressor": lgc.OneBit(warmup_epochs=1)}, r"steps_per_epoch.*"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        set_up(None, **options)


def test_unsupported_models_and_weights_are_refused():
    model = Table().double()
    with pytest.raises(ValueError, match=r"'kernel'.*float64.*16 or 32 bits"):
        DelayedAverager(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="weight: got -1"):
        set_up(None)[2].step(-1)
    for options in ({"lr": 0.0}, {"momentum": 1.0}):
        with pytest.raises(ValueError, match="Nesterov"):
            Nesterov(**options)

    def work(rank, group):
        wrapped = nn.parallel.DistributedDataParallel(Table(), process_group=group)
        with pytest.raises(ValueError, match="the module inside it"):
            DelayedAverager(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), process_group=group)

    run_ranks(2, work)


def test_public_names():
    assert lgc.DelayedAverager is DelayedAverager
    assert lgc.Nesterov is Nesterov
