"""A resumed run is bitwise the run that drained where it was saved."""

import copy
import io

import pytest
import torch

from lightning_gradcomp import Nesterov
from tests.averaging.laws import EVERY
from tests.averaging.workers import conv_net, image_loss, weights
from tests.local_sgd.training import STATEFUL, run_ranks, set_up, train


def stored(*parts):
    """The states of `parts`, saved and loaded with `weights_only=True`."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "options",
    [
        {"period": 4, "delay": 3},
        {"period": 4, "delay": 4, "compressor": EVERY["gradient_dropping"]()},
        {"period": 4, "delay": 2, "compressor": EVERY["onebit"]()},
        {"period": 4, "delay": 2, "compressor": EVERY["powersgd"]()},
        {"period": 3, "delay": 0, "outer": Nesterov()},
        *({"period": 2, "delay": 0, "participation": 0.4, "optimizer": name} for name in STATEFUL),
    ],
    ids=str,
)
def test_a_resumed_run_is_bitwise_the_drained_run(options):
    """All ranks resume from rank 0's checkpoint."""

    how = {"optimizer": "adamw", **options}

    def straight(rank, group):
        model, optimizer, averager = set_up(group, model=conv_net, **how)
        train(model, optimizer, averager, rank, 10, image_loss)
        state = averager.state_dict()  # drains, so it comes before the other states
        saved = [*stored(model, optimizer), state]
        train(model, optimizer, averager, rank, range(10, 21), image_loss)
        return saved, torch.cat([weights(model), model[1].running_mean])

    results = run_ranks(3, straight)
    saved = results[0][0]

    def resumed(rank, group):
        model, optimizer, averager = set_up(group, model=conv_net, **how)
        train(model, optimizer, averager, rank, 5, image_loss)  # a state that loading has to replace
        own = copy.deepcopy(saved)  # ranks are threads, and an optimizer does not copy the tensors that it loads
        for part, state in zip((model, optimizer, averager), own, strict=True):
            part.load_state_dict(state)
        assert averager.steps == 10
        train(model, optimizer, averager, rank, range(10, 21), image_loss)
        return torch.cat([weights(model), model[1].running_mean])

    for got, (_, expected) in zip(run_ranks(3, resumed), results, strict=True):
        assert torch.equal(got, expected)
