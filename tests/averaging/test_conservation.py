"""Nothing is lost, nothing is sent twice, and replicas never drift."""

import pytest
import torch

from tests.averaging.workers import (
    Table,
    all_equal,
    averaged,
    backward,
    dgc,
    prescribed_loss,
    train,
    weights,
)
from tests.threads import run_ranks

COMPRESSED = ("kernel", "matrix")
RULES = {
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "dampening": {"momentum": 0.9, "dampening": 0.3},
    "no momentum": {"momentum": 0.0},
}


def remembered(averager, key, name, like):
    """fp64 copy of what the state holds of `name`, 0 if nothing."""
    return averager.state_dict()["memory"][key].get(name, torch.zeros_like(like)).double()


def corrected(u, gradient, parameter, started, *, momentum, dampening=0.0, nesterov=False, weight_decay=0.0):
    """(u, update) after momentum correction, from torch's definition of SGD."""
    gradient = gradient.double() + weight_decay * parameter.detach().double()
    u = momentum * u + (1 - dampening * started) * gradient
    return u, gradient + momentum * u if nesterov else u if momentum else gradient


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("world", [3])
def test_sent_plus_velocity_is_velocity_plus_update(world, rule, masking):
    """What each rank sent is told by what arrived: the average over the ranks of what left their states."""

    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, dgc(momentum_masking=masking), **rule)
        parameters, log = dict(model.named_parameters()), []
        for step in range(12):
            backward(model, optimizer, rank, step, prescribed_loss)
            before = {}
            for name in COMPRESSED:
                p, u = parameters[name], remembered(averager, "momentum", name, parameters[name])
                u, update = corrected(u, p.grad, p, step > 0, **rule)
                before[name] = u, remembered(averager, "velocity", name, p) + update
            averager.step()
            for name in COMPRESSED:
                (u, there_was), p = before[name], parameters[name]
                sent = there_was - remembered(averager, "velocity", name, p)
                kept_u = remembered(averager, "momentum", name, p)
                log.append((sent, u, kept_u, p.grad.double()))
        return log

    for ranks in zip(*run_ranks(world, work), strict=True):
        arrived = ranks[0][3]
        torch.testing.assert_close(sum(sent for sent, *_ in ranks) / world, arrived, rtol=1e-5, atol=1e-5)
        for sent, u, kept_u, _ in ranks:
            gone = sent.abs() > 1e-4
            assert 0 < int(gone.sum()) <= -(-sent.numel() // 10)
            stays = ~gone if masking else torch.ones_like(gone)
            torch.testing.assert_close(kept_u[stays], u[stays], rtol=1e-5, atol=1e-5)
            assert not masking or not kept_u[gone].any()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("world", [3])
def test_applied_plus_mean_velocity_is_what_sgd_applies(world, nesterov):
    """Dense, sparse, dense, sparse: gradients here do not depend on the weights, so SGD's own path is comparable."""
    learning_rate, steps = 0.02, 40

    def schedule(epoch, step):
        return 0.9 if 5 <= step < 20 or step >= 28 else 0.0

    def work(rank, group):
        model, path = Table(), []
        compressor = dgc(momentum_masking=False)
        optimizer, averager = averaged(model, group, compressor, schedule, lr=learning_rate, nesterov=nesterov)
        for step in range(steps):
            train(model, optimizer, averager, rank, range(step, step + 1), prescribed_loss)
            named = model.named_parameters()
            residual = torch.cat([remembered(averager, "velocity", name, p).reshape(-1) for name, p in named])
            path.append((weights(model).double(), residual))
        return path

    model = Table()
    sgd = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9, nesterov=nesterov)
    for step, ranks in enumerate(zip(*run_ranks(world, work), strict=True)):
        sgd.zero_grad()
        (sum(prescribed_loss(model, rank, step) for rank in range(world)) / world).backward()
        sgd.step()
        residual = sum(residual for _, residual in ranks) / world
        assert bool(residual.any()) == (schedule(0, step) > 0)
        torch.testing.assert_close(
            ranks[0][0] - learning_rate * residual, weights(model).double(), rtol=1e-5, atol=2e-5
        )


def test_after_a_sparse_phase_the_optimizer_has_its_momentum():
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, None, lambda epoch, step: 0.9 if 2 <= step < 8 else 0.0)
        held = []
        for step in range(10):
            train(model, optimizer, averager, rank, range(step, step + 1), prescribed_loss)
            own = averager.state.state_dict()["momentum"].get("kernel")
            in_optimizer = optimizer.state[model.kernel]["momentum_buffer"]
            held.append(own is not None and torch.equal(own, in_optimizer))
        return held, optimizer.state[model.kernel]["momentum_buffer"]

    results = run_ranks(2, work)
    for held, _ in results:
        assert held == [False] * 2 + [True] * 6 + [False] * 2
    assert all_equal([buffer for _, buffer in results])
    assert results[0][1].any()
