"""Drains make weights, buffers and moments the same on all ranks; a reset drops local steps without communication."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from lightning_gradcomp import Nesterov
from tests.averaging.methods import EVERY
from tests.averaging.workers import HAS_MUON, all_equal, conv_net, image_loss, weights
from tests.local_sgd.training import CLOSE, run_ranks, set_up, train


class Buffered(nn.Module):
    """Batch norm, and buffers of all kinds."""

    def __init__(self):
        super().__init__()
        self.net = conv_net()
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("table", torch.linspace(0, 1, 37) * 0.1)
        self.register_buffer("index", torch.tensor([2**40 + 1, -3]))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.cache = torch.zeros(len(x))
        return self.net(x)


def test_an_outer_optimizer_that_never_steps_is_reported():
    def work(rank, group, period):
        model, optimizer, averager = set_up(group, period=period, delay=0, outer=Nesterov())
        train(model, optimizer, averager, rank, 3)
        averager.drain()

    with pytest.warns(UserWarning, match="the outer optimizer has made no step: no round of 4 steps ended"):
        run_ranks(2, partial(work, period=4))
    run_ranks(2, partial(work, period=2))  # a warning would be an error


class Named(nn.Module):
    """With names that the averager uses itself; torchvision's Swin has `norm`."""

    def __init__(self):
        super().__init__()
        self.norm, self.device = nn.LayerNorm(5), nn.Linear(5, 9)

    def forward(self, images):
        return self.device(self.norm(images.flatten(1)[:, :5]))


def test_modules_may_have_any_name():
    def work(rank, group):
        model, optimizer, averager = set_up(group, "adamw", Named, period=2, delay=1)
        train(model, optimizer, averager, rank, 5, image_loss)
        averager.drain()
        return weights(model)

    assert all_equal(run_ranks(2, work))


def test_a_drain_without_buffers_and_moments():
    def work(rank, group):
        model, optimizer, averager = set_up(group, "sgd", period=4, delay=2)
        train(model, optimizer, averager, rank, 6)
        averager.drain()
        return weights(model)

    assert all_equal(run_ranks(2, work))


@pytest.mark.parametrize("compressor", ["bf16", "int8", "eden"])
def test_a_drain_averages_the_open_round_in_fp32(compressor):
    def work(rank, group):
        model, optimizer, averager = set_up(group, "sgd", conv_net, period=8, delay=0, compressor=compressor)
        train(model, optimizer, averager, rank, 3, image_loss)
        own = weights(model)
        averager.drain()
        return own, weights(model)

    owns, drained = zip(*run_ranks(2, work), strict=True)
    torch.testing.assert_close(drained[0], (owns[0] + owns[1]) / 2, **CLOSE)


def assert_ranks_have_the_mean_of_their_own(results):
    """`results`: of each rank, two tensors before the drain and the same two after it."""
    for number in range(2):
        owns, afters = ([pair[side][number] for pair in results] for side in (0, 1))
        assert all_equal(afters)
        assert not all_equal(owns)
        torch.testing.assert_close(afters[0], torch.stack(owns).mean(0), **CLOSE)


@pytest.mark.parametrize(
    ("name", "layer", "moment"),
    [("adamw", 0, "exp_avg_sq"), *[("muon", 0, "exp_avg_sq"), ("muon", 4, "momentum_buffer")] * HAS_MUON],
)
def test_a_drain_averages_buffers_and_moments(name, layer, moment):
    def work(rank, group):
        model, optimizer, averager = set_up(group, name, Buffered, period=4, delay=2)
        train(model, optimizer, averager, rank, 6, image_loss)
        own = model.net[1].running_var.clone(), optimizer.state[model.net[layer].weight][moment].clone()
        averager.drain()
        after = model.net[1].running_var.clone(), optimizer.state[model.net[layer].weight][moment].clone()
        assert torch.equal(model.table, torch.linspace(0, 1, 37) * 0.1)
        assert torch.equal(model.index, torch.tensor([2**40 + 1, -3]))
        assert torch.equal(model.mask, torch.full((3, 3), -torch.inf).triu(1))
        assert model.net[1].num_batches_tracked == 6
        return own, after

    results = run_ranks(3, work)
    assert_ranks_have_the_mean_of_their_own(results)


@pytest.mark.parametrize(("seconds", "step"), [(2, 5), (0, 6)])
def test_a_drain_makes_adams_step_the_same(seconds, step):
    """It is the mean over samples, rounded; a rank that has never stepped receives the state of the others."""

    def work(rank, group):
        model, optimizer, averager = set_up(group, "adamw", period=4, delay=0)
        train(model, optimizer, averager, rank, 6 if rank == 0 else seconds)
        for _ in range(0 if rank == 0 else 6 - seconds):
            averager.step(0)
        averager.drain()
        states = [optimizer.state[p] for p in model.parameters()]
        assert {float(state["step"]) for state in states} == {step}
        return torch.cat([state[moment].reshape(-1) for state in states for moment in ("exp_avg", "exp_avg_sq")])

    assert all_equal(run_ranks(2, work))


def test_a_rank_without_any_batch_can_drain():
    def work(rank, group):
        model, optimizer, averager = set_up(group, "adamw", conv_net, period=2, delay=1)
        if rank == 0:
            train(model, optimizer, averager, rank, 5, image_loss)
        else:
            for _ in range(5):
                averager.step(0)
        averager.drain()
        return torch.cat([weights(model), model[1].running_var])

    results = run_ranks(2, work)
    assert all_equal(results)
    assert not torch.equal(results[0][:-8], weights(conv_net()))


class Observed(nn.Module):
    """Resizes a buffer in its first forward pass, as an observer of quantisation-aware training does."""

    def __init__(self):
        super().__init__()
        self.net = conv_net()
        self.register_buffer("smallest", torch.zeros(0))

    def forward(self, x):
        self.smallest.resize_(3).copy_(x.amin((0, 2, 3)))
        return self.net(x)


def test_a_resized_buffer_is_copied_from_rank_0():
    def work(rank, group):
        model, optimizer, averager = set_up(group, "sgd", Observed, period=4, delay=2)
        seen = []
        for steps in (range(6), range(6, 12)):
            train(model, optimizer, averager, rank, steps, image_loss)
            own = model.smallest.clone()
            averager.drain()
            seen.append((own, model.smallest.clone()))
        return seen

    for (first, _), (other, after) in zip(*run_ranks(2, work), strict=True):
        assert torch.equal(after, first)
        assert not torch.equal(other, first)


def test_a_drain_replaces_buffers_that_are_not_finite():
    def work(rank, group):
        model, optimizer, averager = set_up(group, "momentum", conv_net, period=4, delay=2)
        train(model, optimizer, averager, rank, 3, image_loss)
        if rank == 1:
            model(torch.full((4, 3, 6, 6), torch.nan))
            assert model[1].running_mean.isnan().all()
        own = model[1].running_mean.clone()
        averager.drain()
        return model[1].running_mean.clone(), own

    (got, own), (other, _) = run_ranks(2, work)
    assert torch.equal(got, other)
    torch.testing.assert_close(got, own)


def test_a_second_drain_changes_nothing():
    def work(rank, group):
        model, optimizer, averager = set_up(group, period=4, delay=2, compressor=EVERY["gradient_dropping"]())
        train(model, optimizer, averager, rank, 7)
        averager.drain()
        drained, sent = weights(model), averager.spent.bytes_sent
        averager.drain()
        assert averager.spent.bytes_sent == sent
        assert torch.equal(weights(model), drained)

    run_ranks(2, work)


def test_reset_to_last_average_needs_no_other_rank():
    """The weights become the latest average, which is the same on all ranks, while an exchange is pending."""

    def work(rank, group):
        model, optimizer, averager = set_up(group, period=4, delay=3)
        assert not averager.reset_to_last_average()
        train(model, optimizer, averager, rank, 7)
        before = weights(model)
        train(model, optimizer, averager, rank, range(7, 10))
        assert averager.reset_to_last_average()
        return before, weights(model)

    before, after = zip(*run_ranks(3, work), strict=True)
    assert all_equal(after)
    assert not all_equal(before)  # the average of steps 1 to 4, plus each rank's steps 5 to 7


def test_a_parameter_may_be_frozen_and_unfrozen():
    def work(rank, group):
        model, optimizer, averager = set_up(group, period=4, delay=2, compressor=EVERY["onebit"]())
        train(model, optimizer, averager, rank, 6)
        model.matrix.requires_grad_(False)
        model.matrix.grad = None
        frozen = weights_after(averager, model, optimizer, rank, range(6, 7))
        assert torch.equal(frozen, weights_after(averager, model, optimizer, rank, range(7, 13)))
        model.matrix.requires_grad_(True)
        assert not torch.equal(frozen, weights_after(averager, model, optimizer, rank, range(13, 16)))
        everything, matrix = len(weights(model)), model.matrix.numel()
        assert averager.spent.dense_bytes == 4 * (9 * everything + 7 * (everything - matrix))
        averager.drain()
        return weights(model)

    def weights_after(averager, model, optimizer, rank, steps):
        train(model, optimizer, averager, rank, steps)
        return model.matrix.detach().clone()

    assert all_equal(run_ranks(2, work))


class Taught(nn.Module):
    """With a teacher, a frozen parameter that stays, and a parameter and buffers that DDP is told to ignore."""

    def __init__(self):
        super().__init__()
        self.net = conv_net()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.still = nn.Parameter(torch.linspace(0, 1, 37) * 0.1, requires_grad=False)
        self.own = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.register_buffer("place", torch.zeros(1))
        self.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)
        self._ddp_params_and_buffers_to_ignore = ["own", "place", "graph"]

    def forward(self, x):
        return self.net(x)


def test_a_drain_averages_what_follows_the_ranks_own_weights():
    """A teacher in the model, and a moving average outside of it."""

    def work(rank, group):
        model, optimizer, averager = set_up(group, "adamw", Taught, period=4, delay=2)
        average = AveragedModel(model.net, avg_fn=get_ema_avg_fn(0.5))
        averager.averages = [average]
        for step in range(6):
            train(model, optimizer, averager, rank, range(step, step + 1), image_loss)
            average.update_parameters(model.net)
            for mean, new in zip(model.teacher.parameters(), model.net.parameters(), strict=True):
                mean.data.lerp_(new.data, 0.5)
            model.own.data += rank
            model.place += rank
        own = weights(model.teacher), weights(average)
        averager.drain()
        assert model.own == model.place == 6 * rank
        assert torch.equal(model.still, torch.linspace(0, 1, 37) * 0.1)
        assert average.n_averaged == 6
        return own, (weights(model.teacher), weights(average))

    results = run_ranks(3, work)
    assert_ranks_have_the_mean_of_their_own(results)
