"""Error feedback that stays with the ranks, decayed, as in SparseLoCo: the rule, its law, resuming, refusals."""

import copy

import pytest
import torch

from lightning_gradcomp import DGC, SPARSELOCO, DelayedAverager, GradientDropping, Nesterov, OneBit, PowerSGD, TwoBit
from lightning_gradcomp.averaging import mean_state
from tests.averaging.workers import Table, all_equal, backward, bowl_loss, conv_net, image_loss, weights
from tests.local_sgd.test_update_rule import follow, weights_at_each_step
from tests.local_sgd.training import CLOSE, OPTIMIZERS, check_resumes_bitwise, run_ranks, set_up, stored, train
from tests.reference.delayed import PaperSparseLoCo

QUICK = {"min_elements": 64, "warmup_epochs": 0}
TENSORS = [(0, 360, 72), (360, 660, 60), (660, 669, None), (669, 679, None)]
"""Of a Table: where they are, and how many entries are a fifth of those that `sparse` compresses."""


def sparse(**options):
    return GradientDropping(**{"sparsity": 0.8, "scope": "tensor", **QUICK, **options})


METHODS = {
    "sparse": sparse,
    "int2": lambda: sparse(values="int2", dense_values="int8"),
    "onebit": lambda: OneBit(**QUICK),
    "twobit": lambda: TwoBit(**QUICK),
    "powersgd": lambda: PowerSGD(rank=1, **QUICK),
    "dgc": lambda: DGC(sparsity=0.8, dense_epochs=0, **QUICK),
}


@pytest.mark.parametrize("mean", ["ranks", "senders"])
@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
def test_rounds_follow_the_paper(mean, decay):
    how = {"period": 4, "delay": 0, "error_decay": decay}
    got = weights_at_each_step(3, 21, "sgd", compressor=sparse(mean=mean), **how)
    reference = PaperSparseLoCo(weights(Table()), TENSORS, 3, lr=0.02, period=4, decay=decay, mean=mean)
    torch.testing.assert_close(got.double(), torch.from_numpy(follow(reference, 21)), **CLOSE)


@pytest.mark.parametrize(("lr", "momentum"), [(0.4, 0.0), (0.9, 0.8)], ids=["outer learning rate", "muloco"])
def test_an_outer_optimizer_steps_on_what_was_sent(lr, momentum):
    """And leaves the error feedback as it is."""
    how = {"period": 4, "delay": 0, "error_decay": 0.9, "outer": Nesterov(lr, momentum)}
    got = weights_at_each_step(3, 21, "sgd", compressor=sparse(), **how)
    outer = {"outer_lr": lr, "outer_momentum": momentum}
    reference = PaperSparseLoCo(weights(Table()), TENSORS, 3, lr=0.02, period=4, decay=0.9, mean="ranks", **outer)
    torch.testing.assert_close(got.double(), torch.from_numpy(follow(reference, 21)), **CLOSE)


def unsent(averager):
    """What this rank has left out, as something to add to the weights: fp64 [n]."""
    memory = averager.rounds.state_dict()["memory"]
    parts = []
    for name, z in averager.rounds.anchor.module.named_parameters():
        kinds = ("residual", "velocity", "dense_residual")
        left = [memory[kind][name] for kind in kinds if name in memory.get(kind, {})]
        parts.append(-sum(left, torch.zeros_like(z)).double().reshape(-1))  # gradients point the other way
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("make", "delay"), [(sparse, 0), *((make, 3) for make in METHODS.values())], ids=["no delay", *METHODS]
)
def test_without_decay_nothing_is_lost(make, delay):
    """Drained weights + the mean of what is remembered = the start + the mean of all updates. Drains keep it."""

    def work(rank, group):
        how = {"compressor": make(), "period": 4, "delay": delay, "error_decay": 1}
        model, made, averager = set_up(group, "adamw", **how)
        total = torch.zeros(len(weights(model)), dtype=torch.float64)
        for step in range(26):
            backward(model, made, rank, step, bowl_loss)
            with averager.stepping():
                before = weights(model).double()
                made.step()
                total += weights(model).double() - before
            if step in (9, 25):
                averager.drain()
        return total, unsent(averager), weights(model)

    totals, left, drained = (torch.stack(parts) for parts in zip(*run_ranks(3, work), strict=True))
    assert all_equal(drained)
    assert float(left.norm(dim=1).min()) > 1e-3
    expected = weights(Table()).double() + totals.mean(0)
    torch.testing.assert_close(drained[0].double() + left.mean(0), expected, rtol=1e-5, atol=2e-6)


def test_sending_everything_is_local_sgd():
    how = {"period": 4, "delay": 2}
    plain = weights_at_each_step(2, 13, "adamw", **how)
    everything = GradientDropping(sparsity=0.0, **QUICK)
    assert torch.equal(plain, weights_at_each_step(2, 13, "adamw", compressor=everything, error_decay=0.9, **how))


def test_a_drain_sends_a_compressed_round_and_keeps_moments():
    def work(rank, group):
        model, made, averager = set_up(group, "adamw", compressor=sparse(), period=4, delay=3, error_decay=0.95)
        train(model, made, averager, rank, 6)
        before = averager.spent.bytes_sent
        averager.drain()
        moments = torch.cat([made.state[p]["exp_avg"].reshape(-1) for p in model.parameters()])
        return weights(model), moments, averager.spent.bytes_sent - before

    drained, moments, sent = zip(*run_ranks(2, work), strict=True)
    assert all_equal(drained)
    assert not all_equal(moments)
    assert sent[0] < 4 * len(drained[0])  # two rounds, of a fifth each


@pytest.mark.parametrize(
    "options",
    [{"period": 4, "delay": 0}, {"period": 4, "delay": 3}, {"period": 2, "delay": 0, "participation": 0.4}],
    ids=str,
)
def test_each_rank_resumes_bitwise_in_mid_round(options):
    how = {"optimizer": "adamw", "compressor": sparse(values="int2"), "error_decay": 0.95, **options}
    check_resumes_bitwise(3, lambda group: set_up(group, model=conv_net, **how), image_loss, own_states=True)


def test_other_numbers_of_ranks_take_over_the_mean():
    how = {"compressor": sparse(), "period": 4, "delay": 0, "error_decay": 0.95}

    def first(rank, group):
        model, optimizer, averager = set_up(group, "adamw", **how)
        train(model, optimizer, averager, rank, 10)
        state = averager.state_dict()
        return stored(model, optimizer), state, unsent(averager)

    results = run_ranks(3, first)
    (model_state, optimizer_state), state, _ = results[0]
    merged = {**state, "rounds": {**state["rounds"], **mean_state([each[1]["rounds"] for each in results])}}

    def then(rank, group):
        model, optimizer, averager = set_up(group, "adamw", **how)
        model.load_state_dict(copy.deepcopy(model_state))
        optimizer.load_state_dict(copy.deepcopy(optimizer_state))
        averager.load_state_dict(copy.deepcopy(merged))
        left = unsent(averager)
        train(model, optimizer, averager, rank, range(10, 14))
        return left, weights(model)

    left, trained = zip(*run_ranks(2, then), strict=True)
    assert all_equal(trained)
    expected = torch.stack([each[2] for each in results]).mean(0)
    for own in left:
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-7)


def test_the_preset_makes_rounds_of_a_146th():
    """64 of 4,096 in 2 bits; positions by themselves would take 12 bits each in the authors' coding."""

    class Wide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = torch.nn.Parameter(torch.randn(128, 1024, generator=torch.Generator().manual_seed(0)))

    def work(rank, group):
        model = Wide()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        averager = DelayedAverager(model, optimizer, process_group=group, **SPARSELOCO)
        for step in range(15):
            generator = torch.Generator().manual_seed(1000 * rank + step)
            model.matrix.grad = torch.randn(model.matrix.shape, generator=generator)
            averager.step()
        return averager.spent.bytes_sent, weights(model)

    sent, got = zip(*run_ranks(2, work), strict=True)
    assert all_equal(got)
    assert 4 * 128 * 1024 / sent[0] > 146


@pytest.mark.parametrize("error_decay", [1.5, -0.1, "yes", float("nan")])
def test_refusals(error_decay):
    model = Table()
    with pytest.raises(ValueError, match=f"error_decay: got {error_decay!r}, allowed: None, or a number from 0 to 1"):
        DelayedAverager(model, torch.optim.SGD(model.parameters(), lr=0.1), "onebit", epoch=0, error_decay=error_decay)
