"""Parameters of every kind: frozen, tied, oddly laid out, of low precision, and none to compress."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn

from lightning_gradcomp import GradientAverager, OneBit
from tests.averaging.workers import (
    Table,
    all_equal,
    averaged,
    backward,
    bowl_loss,
    conv_net,
    dgc,
    filled,
    prescribed_loss,
    seeded,
    train,
    train_ddp,
    weights,
)
from tests.threads import run_ranks


@pytest.mark.parametrize("sparsity", [0.0, 0.9])
def test_a_layer_unfrozen_on_the_way_is_averaged_from_then_on(sparsity):
    def work(rank, group):
        model = conv_net()
        model[0].requires_grad_(False)
        optimizer, averager = averaged(model, group, dgc(sparsity=sparsity))
        train(model, optimizer, averager, rank, 3)
        assert torch.equal(model[0].weight, conv_net()[0].weight)
        model[0].requires_grad_(True)
        train(model, optimizer, averager, rank, range(3, 10))
        assert not torch.equal(model[0].weight, conv_net()[0].weight)
        return weights(model)

    assert all_equal(run_ranks(2, work))


def test_a_layer_frozen_for_a_while_keeps_its_state():
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group)
        train(model, optimizer, averager, rank, 4, prescribed_loss)
        before = averager.state.state_dict()
        model.kernel.requires_grad_(False)
        optimizer.zero_grad()
        frozen = model.kernel.detach().clone()
        for _ in range(3):
            optimizer.zero_grad()
            averager.step()
        assert torch.equal(model.kernel, frozen)
        assert torch.equal(averager.state_dict()["memory"]["velocity"]["kernel"], before["velocity"]["kernel"])
        model.kernel.requires_grad_(True)
        backward(model, optimizer, rank, 0, lambda *given: 0 * prescribed_loss(*given))
        averager.step()
        expected = before["velocity"]["kernel"] + 0.9 * before["momentum"]["kernel"]
        now = averager.state.state_dict()["velocity"]["kernel"]
        kept = now != 0
        assert 0 < int(kept.sum()) < kept.numel()
        torch.testing.assert_close(now[kept], expected[kept])
        return weights(model)

    assert all_equal(run_ranks(2, work))


def test_tied_weights_are_one_parameter():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 8)
            self.head = nn.Linear(8, 20, bias=False)
            self.head.weight = self.embed.weight
            filled(self)

        def forward(self, tokens, following):
            return nn.functional.cross_entropy(self.head(self.embed(tokens)), following)

    def token_loss(model, rank, step):
        tokens = torch.randint(0, 20, (2, 16), generator=seeded(rank, step))
        return model(tokens[0], tokens[1])

    def ours(sparsity):
        def work(rank, group):
            model = Tied()
            optimizer, averager = averaged(model, group, dgc(sparsity=sparsity))
            train(model, optimizer, averager, rank, 20, token_loss)
            assert set(averager.state.state_dict()["velocity"]) <= {"embed.weight"}
            assert model.head.weight is model.embed.weight
            return weights(model)

        return run_ranks(2, work)

    def ddp(rank, group):
        model = Tied()
        train_ddp(model, averaged(model, group)[0], group, rank, 20, token_loss)
        return weights(model)

    assert float((ours(0.0)[0] - run_ranks(2, ddp)[0]).abs().max()) <= 1e-6
    assert all_equal(ours(0.9))


@pytest.mark.parametrize("kind", [partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.AdamW, lr=0.01)])
def test_fused_dense_steps_of_channels_last_weights_get_the_momentum_in_their_strides(kind):
    """torch's fused kernels take weights and moments as they are in memory. Dense, compressed and dense again; after
    compressed steps a checkpoint has such moments too."""

    def run(memory_format, fused):
        def work(rank, group):
            model = Table()
            model.kernel.data = model.kernel.data.to(memory_format=memory_format)
            optimizer = kind(model.parameters(), fused=fused)
            averager = GradientAverager(model, dgc(values="fp32"), optimizer=optimizer, process_group=group)
            averager.schedule = lambda epoch, step: 0.9 if 2 <= step < 5 or step >= 8 else 0.0
            train(model, optimizer, averager, rank, 10, prescribed_loss)
            [held] = [moments for p, moments in averager.optimizer_state().items() if p is model.kernel]
            assert {moment.stride() for moment in held.values()} == {model.kernel.stride()}
            return weights(model)

        return run_ranks(2, work)[0]

    expected = run(torch.contiguous_format, fused=False)
    torch.testing.assert_close(run(torch.channels_last, fused=True), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parameters_of_another_precision_have_fp32_state(dtype):
    sparsities = [0.0] * 2 + [0.9] * 6 + [0.0] * 2

    def work(rank, group):
        model = Table().to(dtype)
        optimizer, averager = averaged(model, group, None, lambda epoch, step: sparsities[step], weight_decay=0.1)
        for step in range(10):
            train(model, optimizer, averager, rank, range(step, step + 1), prescribed_loss)
            parts = averager.state.state_dict()["velocity"]
            assert all(part.dtype == torch.float32 for part in parts.values())
            assert bool(parts) == (2 <= step < 8)
        assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {dtype}
        assert optimizer.state[model.kernel]["momentum_buffer"].dtype == dtype
        return weights(model)

    results = run_ranks(2, work)
    assert all_equal(results)
    assert bool(torch.isfinite(results[0]).all())


def test_a_model_with_nothing_to_compress_trains_as_in_ddp():
    def net():
        return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))

    def loss(model, rank, step):
        return model(torch.randn(8, 6, generator=seeded(rank, step))).square().mean()

    def ours(rank, group):
        model = filled(net())
        train(model, *averaged(model, group), rank, 10, loss)
        return weights(model)

    def ddp(rank, group):
        model = filled(net())
        train_ddp(model, averaged(model, group)[0], group, rank, 10, loss)
        return weights(model)

    got = run_ranks(2, ours)
    assert all_equal(got)
    assert float((got[0] - run_ranks(2, ddp)[0]).abs().max()) <= 1e-6


def test_excluded_parameters_travel_whole():
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, dgc(exclude=["ker*"]))
        train(model, optimizer, averager, rank, 3, prescribed_loss)
        return set(averager.state.state_dict()["velocity"]), model.kernel.grad

    (names, grad), _ = run_ranks(2, work)
    assert names == {"matrix"}
    assert bool((grad != 0).all())


@pytest.mark.parametrize("compressor", ["none", "int8", dgc(), OneBit(min_elements=50, warmup_steps=2)])
def test_gradients_with_a_graph_are_averaged_without_it(compressor):
    """backward(create_graph=True), as optimizers of second order call it. The caller's gradients keep their graph."""

    def work(rank, group):
        trained = []
        for create_graph in (False, True):
            model = Table()
            optimizer, averager = averaged(model, group, compressor)
            for step in range(4):
                optimizer.zero_grad()
                bowl_loss(model, rank, step).backward(create_graph=create_graph)
                own = model.kernel.grad
                averager.average()
                assert not model.kernel.grad.requires_grad
                if create_graph:
                    torch.autograd.grad(own.square().sum(), model.kernel)
                optimizer.step()
            trained.append(weights(model))
        return torch.equal(*trained)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
        assert all(run_ranks(2, work))
