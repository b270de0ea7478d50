"""Several optimizers in rounds: equal to one with several groups, averaged, skipped and resumed like one."""

import pytest
import torch

from lightning_gradcomp import DelayedAverager, GradientDropping, Nesterov
from tests.averaging.workers import Table, all_equal, backward, bowl_loss, weights
from tests.local_sgd.training import CLOSE, check_resumes_bitwise, run_ranks, train

HALF = GradientDropping(sparsity=0.5, scope="tensor", min_elements=64, warmup_epochs=0)


class Several(list):
    """Optimizers that a training loop treats like one."""

    def zero_grad(self):
        for each in self:
            each.zero_grad()

    def state_dict(self):
        return [each.state_dict() for each in self]

    def load_state_dict(self, states):
        for each, state in zip(self, states, strict=True):
            each.load_state_dict(state)


def muon_and_adamw(model):
    """Muon for one matrix, AdamW for the rest, and a second AdamW for the bias, which has two optimizers."""
    rest = [model.kernel, model.small, model.bias]
    return Several(
        [
            torch.optim.Muon([model.matrix], lr=0.02),
            torch.optim.AdamW(rest, lr=0.01),
            torch.optim.AdamW([model.bias], lr=0.001),
        ]
    )


def set_up(group, **options):
    model = Table()
    optimizers = muon_and_adamw(model)
    return model, optimizers, DelayedAverager(model, optimizers, process_group=group, **options)


def moments(optimizers):
    tensors = [value for each in optimizers for entries in each.state.values() for value in entries.values()]
    return torch.cat([value.reshape(-1) for value in tensors if value.numel() > 1])


@pytest.mark.parametrize(
    "options",
    [
        {"period": 3, "delay": 2},
        {"period": 3, "delay": 0, "outer": Nesterov(), "compressor": HALF, "error_decay": 0.9},
        {"period": 3, "delay": 3, "participation": 0.5},
    ],
    ids=str,
)
def test_two_optimizers_are_one_with_two_groups(options):
    fast, slow = {"lr": 0.02, "momentum": 0.9}, {"lr": 0.01, "momentum": 0.5}

    def trained(rank, group, split):
        model = Table()
        own, other = [model.kernel, model.bias], [model.matrix, model.small]
        if split:
            made = Several([torch.optim.SGD(own, **fast), torch.optim.SGD(other, **slow)])
        else:
            made = torch.optim.SGD([{"params": own, **fast}, {"params": other, **slow}])
        averager = DelayedAverager(model, made, process_group=group, **options)
        train(model, made, averager, rank, 8, bowl_loss)
        averager.drain()
        train(model, made, averager, rank, range(8, 13), bowl_loss)
        return weights(model)

    one, two = (run_ranks(2, lambda rank, group, split=split: trained(rank, group, split)) for split in (False, True))
    assert torch.equal(torch.stack(one), torch.stack(two))
    assert not all_equal(one)


def test_ranks_with_the_same_data_train_as_one():
    """MuLoCo's inner loop: without compression and an outer momentum, an average of equal updates changes nothing."""

    def work(rank, group):
        model, optimizers, averager = set_up(group, period=3, delay=0, outer=Nesterov(1.0, 0.0))
        train(model, optimizers, averager, 0, 8, bowl_loss)
        averager.drain()
        return weights(model)

    model = Table()
    optimizers = muon_and_adamw(model)
    for step in range(8):
        backward(model, optimizers, 0, step, bowl_loss)
        for optimizer in optimizers:
            optimizer.step()
    for got in run_ranks(2, work):
        torch.testing.assert_close(got, weights(model), rtol=1e-4, atol=1e-4)  # Muon computes in bf16


def test_a_drain_averages_the_moments_of_all_optimizers():
    def work(rank, group):
        model, optimizers, averager = set_up(group, period=4, delay=2)
        train(model, optimizers, averager, rank, 6, bowl_loss)
        own = moments(optimizers).clone()
        averager.drain()
        return own, moments(optimizers)

    owns, afters = zip(*run_ranks(3, work), strict=True)
    assert not all_equal(owns)
    assert all_equal(afters)
    torch.testing.assert_close(afters[0], torch.stack(owns).mean(0), **CLOSE)


def test_an_update_that_is_not_finite_leaves_no_nan_in_any_optimizer():
    def work(rank, group):
        model, optimizers, averager = set_up(group, period=2, delay=0)
        for step in range(4):
            backward(model, optimizers, rank, step, bowl_loss)
            if rank == 1 and step == 1:
                model.bias.grad.fill_(torch.nan)
            averager.step()
        return weights(model), moments(optimizers)

    trained, states = zip(*run_ranks(2, work), strict=True)
    assert all_equal(trained)
    assert all(bool(tensor.isfinite().all()) for tensor in (*trained, *states))


@pytest.mark.parametrize("error_decay", [None, 0.9])
def test_each_rank_resumes_bitwise(error_decay):
    how = {"period": 4, "delay": 2, "compressor": HALF, "error_decay": error_decay}
    check_resumes_bitwise(2, lambda group: set_up(group, **how), own_states=True)
