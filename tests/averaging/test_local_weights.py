"""With DGC and SGD too, a rank's gradient is computed at the shared weights less what it has not sent itself."""

import torch

from lightning_gradcomp.averaging import GradientAverager
from tests.averaging.workers import Table, averaged, dgc, prescribed_loss
from tests.threads import run_ranks


def test_velocity_is_subtracted_at_each_groups_rate():
    def work(rank, group):
        model = Table()
        first, *others = model.parameters()
        groups = [{"params": [first], "lr": 0.05}, {"params": others, "lr": 0.2}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        averager = GradientAverager(model, dgc(), optimizer=optimizer, process_group=group)
        for step in range(5):
            optimizer.zero_grad()
            with averager.local_weights():
                prescribed_loss(model, rank, step).backward()
            averager.step()
        rates = {id(p): each["lr"] for each in optimizer.param_groups for p in each["params"]}
        shared = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        velocity, moved = averager.state_dict()["memory"]["velocity"], 0
        with averager.local_weights():
            for name, parameter in model.named_parameters():
                if name in velocity:
                    expected = shared[name] - rates[id(parameter)] / 2**0.5 * velocity[name]
                    torch.testing.assert_close(parameter.detach(), expected)
                    moved += not torch.equal(parameter, shared[name])
                else:
                    assert torch.equal(parameter, shared[name])
        assert all(torch.equal(parameter, shared[name]) for name, parameter in model.named_parameters())
        return moved, shared

    (moved, shared), (_, others) = run_ranks(2, work)
    assert moved > 1
    assert all(torch.equal(shared[name], others[name]) for name in shared)


def test_it_settles_where_the_shared_weights_alone_swing():
    """A quadratic bowl: by the time that a velocity is sent, the slope at the shared weights is an old one."""

    def work(rank, group, local):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 32, bias=False)
        optimizer, averager = averaged(model, group, dgc(sparsity=0.98), lr=0.1, momentum=0.9, weight_decay=0.0)
        for _ in range(100):
            optimizer.zero_grad()
            if local:
                averager.use_local_weights()
            model.weight.square().sum().div(2).backward()
            averager.use_shared_weights()
            averager.step()
        return float(model.weight.detach().norm())

    local, shared = (run_ranks(2, lambda rank, group, use=use: work(rank, group, use))[0] for use in (True, False))
    assert local < shared / 2
