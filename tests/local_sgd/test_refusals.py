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
        (
            {"compressor": lgc.OneBit(clip_norm=1.0)},
            r"OneBit.clip_norm in rounds of local steps: got 1.0, allowed: None",
        ),
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
    with pytest.raises(ValueError, match="parameters in DelayedAverager: got '4 outside the model', allowed: only"):
        DelayedAverager(Table(), torch.optim.SGD(Table().parameters(), lr=0.1))
    model, temperature = Table(), nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="parameters in DelayedAverager: got '1 outside the model', allowed: only"):
        DelayedAverager(model, torch.optim.SGD([*model.parameters(), temperature], lr=0.1))
    model._ddp_params_and_buffers_to_ignore = ["kernel"]
    with pytest.raises(ValueError, match=r"'kernel' with DelayedAverager: got 'a trainable .*, allowed: requires_grad"):
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


def test_a_frozen_parameter_may_be_of_any_kind():
    """And stays as it is, until somebody unfreezes it."""
    kinds = {
        "complex": torch.tensor([1 + 2j, 3]),
        "numbers": torch.tensor([1, 2]),
        "mask": torch.tensor([True, False]),
        "exact": torch.tensor([0.1, 0.2], dtype=torch.float64),
    }

    class Frozen(Table):
        def __init__(self):
            super().__init__()
            for name, tensor in kinds.items():
                setattr(self, name, nn.Parameter(tensor.clone(), requires_grad=False))
            self.table = nn.Embedding.from_pretrained(torch.ones(3, 2), sparse=True)

    def work(rank, group):
        model, _, averager = set_up(group, model=Frozen, period=2, delay=1)
        start = model.matrix.detach().clone()

        def step():
            for p in (model.kernel, model.matrix, model.small, model.bias):
                p.grad = torch.full_like(p, 1.0 + rank)
            averager.step()

        for _ in range(5):
            step()
        averager.drain()
        moved = not torch.equal(model.matrix, start)
        for unfrozen, message in (("exact", "float64, allowed: 16 or 32 bits"), ("complex", "a real floating-point")):
            getattr(model, unfrozen).requires_grad_(True)
            with pytest.raises(ValueError, match=f"'{unfrozen}'.*{message}"):
                step()
            getattr(model, unfrozen).requires_grad_(False)
        return moved, {name: getattr(model, name).detach() for name in kinds}

    for moved, frozen in run_ranks(2, work):
        assert moved
        assert all(torch.equal(frozen[name], tensor) for name, tensor in kinds.items())
