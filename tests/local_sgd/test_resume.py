"""A resumed run is bitwise the run that drained where it was saved."""

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_gradcomp import DelayedAverager, Nesterov
from tests.averaging.methods import EVERY
from tests.averaging.workers import conv_net, image_loss
from tests.local_sgd.training import STATEFUL, check_resumes_bitwise, set_up
from tests.threads import run_ranks


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
    check_resumes_bitwise(3, lambda group: set_up(group, model=conv_net, **how), image_loss)


def test_the_outer_momentum_is_restored_if_activations_are_checkpointed_now():
    def velocities(rank, group):
        found, state = [], None
        for wrap in (lambda layer: layer, checkpoint_wrapper):
            model = torch.nn.Sequential(wrap(torch.nn.Linear(2, 2)))
            how = {"period": 1, "delay": 0, "outer": Nesterov()}
            averager = DelayedAverager(model, torch.optim.SGD(model.parameters(), 0.1), process_group=group, **how)
            if state:
                averager.load_state_dict(state)
            else:
                model(torch.ones(1, 2)).sum().backward()
                averager.step()
            state = averager.state_dict()
            found.append(state["rounds"]["outer"])
        return found

    for saved, resumed in run_ranks(2, velocities):
        assert saved.keys() == resumed.keys() == {"0.weight", "0.bias"}
        assert all(torch.equal(resumed[name], velocity) and velocity.any() for name, velocity in saved.items())
