"""TernGrad: unbiased, ternary, with one scaler for all ranks, five digits a byte."""

from unittest import mock

import pytest
import torch

from lightning_gradcomp.compressors import TernGrad
from lightning_gradcomp.compressors.kernels.rng import Uniform
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.terngrad import pack, scaler_of, ternarise
from tests.averaging.methods import note_sent, recorded_bytes
from tests.averaging.workers import Table, averaged, backward, conv_net, prescribed_loss, seeded, train
from tests.compressors.one_worker import CPU, normal
from tests.threads import ALL_GATHER, checked_collectives, run_ranks


def unpacked(packed, n):
    """The n digits in a payload, -1, 0 and 1."""
    return TernGrad().decode([torch.ones(()), packed], n)


def clipped(g, c):
    """g clipped at its scaler."""
    s = scaler_of(g.reshape(-1), c)
    return g.clamp(-s, s)


def terngrad(**options):
    return TernGrad(**{"min_elements": 40, "warmup_epochs": 0, **options})


def steps_of(world, steps=1, **options):
    """For each rank and step: name -> what the ranks sent on average, what this rank sent, its own gradient."""

    def work(rank, group):
        model, log = Table(), []
        optimizer, averager = averaged(model, group, terngrad(**options))
        sent = note_sent(averager)
        for step in range(steps):
            backward(model, optimizer, rank, step, prescribed_loss)
            own = {name: p.grad.clone() for name, p in model.named_parameters()}
            averager.average()
            averager.commit()
            arrived = {name: p.grad.clone() for name, p in model.named_parameters()}
            log.append((arrived, sent[-1], own))
        return log

    return run_ranks(world, work)


def test_the_mean_of_10_000_draws_is_the_gradient():
    """Within five standard errors. A draw is ±s with probability |g|/s, so its variance is s|g| - g²."""
    draws, s = 10_000, torch.tensor(2.0)
    g = torch.tensor([0.0, 1e-3, -0.01, 0.3, -0.7, 1.0, -1.9, 2.0, -2.0])
    t = ternarise(g.repeat(draws), s, Uniform(CPU, 7)).view(draws, -1).float() - 1
    assert set(t.unique().tolist()) == {-1, 0, 1}
    standard_error = ((s * g.abs() - g**2) / draws).sqrt()
    assert bool(((s * t.mean(0) - g).abs() <= 5 * standard_error).all())
    assert bool((t[:, 0] == 0).all())
    assert bool((t[:, 7] == 1).all())
    assert bool((t[:, 8] == -1).all())


def test_the_largest_draw_of_a_gpu_makes_no_fourth_digit():
    class OfGPU(Uniform):
        """Its rounding and limit on the CPU, with the largest number that `torch.rand` makes."""

        def __init__(self):
            super().__init__(CPU, 0)
            self._generator = True

    s = torch.rand(20_000, generator=seeded(0)) + 0.1
    with mock.patch.object(torch, "rand", lambda n, **_: torch.full((n,), 1 - 2**-24)):
        assert {int(ternarise(each.view(1), each, OfGPU())) for each in s} == {2}


def test_the_mean_of_many_steps_is_the_gradient():
    """Three ranks with one gradient and 100 steps are 300 draws of every element; again five standard errors."""
    steps, world = 100, 3
    g = normal(300, seed=2).view(12, 25)

    def work(rank, group):
        model, total = Table(), 0
        _, averager = averaged(model, group, terngrad(clip_sigma=0))
        for _ in range(steps):
            model.matrix.grad = g.clone()
            averager.average()
            averager.commit()
            total = total + model.matrix.grad
        return total / steps

    mean = run_ranks(world, work)[0]
    standard_error = ((g.abs().max() * g.abs() - g**2) / (steps * world)).sqrt()
    assert bool(((mean - g).abs() <= 5 * standard_error + 1e-5).all())


@pytest.mark.parametrize("world", [2, 3])
def test_sums_are_multiples_of_the_largest_scaler(world):
    ranks = steps_of(world, steps=4)
    for step in range(4):
        for name in ("kernel", "matrix"):
            own = [log[step][2][name] for log in ranks]
            s = max(clipped(g, 2.5).abs().max() for g in own)
            for log in ranks:
                sent = log[step][1][name].float()
                assert set((sent / s).unique().tolist()) <= {-1.0, 0.0, 1.0}
                assert (sent * log[step][2][name] >= 0).all()
            multiple = ranks[0][step][0][name] * world / s
            torch.testing.assert_close(multiple, multiple.round(), rtol=0, atol=1e-5)
            assert multiple.round().abs().max() <= world
            assert multiple.round().any()


def test_without_sharing_each_rank_has_its_own_scaler():
    for log in steps_of(2, share_scaler=False):
        _, sent, own = log[0]
        for name in ("kernel", "matrix"):
            s = clipped(own[name], 2.5).abs().max()
            assert set((sent[name].float() / s).unique().tolist()) == {-1.0, 0.0, 1.0}


def test_gradients_are_clipped_at_2_5_standard_deviations():
    g = torch.cat([normal(1000), torch.tensor([50.0])])
    g = torch.cat([g, -g])  # so that the mean is 0
    limit = 2.5 * float(g.double().std(correction=0))
    assert limit < 50
    expected = g.clamp(-limit, limit)
    torch.testing.assert_close(clipped(g, 2.5), expected, rtol=1e-6, atol=0)
    assert float(clipped(g, 2.5).abs().max()) == pytest.approx(limit)
    assert torch.equal(clipped(g, 0), g)


@pytest.mark.parametrize("value", [3.0, -1e-3])
def test_a_gradient_without_spread_is_not_clipped(value):
    g = torch.full((100,), value)
    torch.testing.assert_close(clipped(g, 2.5), g)
    one = torch.full((1,), value)
    torch.testing.assert_close(clipped(one, 2.5), one)


@pytest.mark.parametrize("scale", [1e-24, 1e-30, 1e24, 1e30])
def test_clipping_does_not_depend_on_the_gradients_scale(scale):
    g = normal(1000).pow(3)
    torch.testing.assert_close(clipped(g * scale, 2.5) / scale, clipped(g, 2.5), rtol=1e-5, atol=1e-9)


def test_the_last_matrix_may_stay_dense():
    def work(rank, group):  # also while it is frozen
        model = conv_net()
        compressor = terngrad(dense_last_layer=True, error_feedback=True)
        optimizer, averager = averaged(model, group, compressor, lambda epoch, step: 0.9)
        assert averager.gradients.layout.names == ("0.weight",)
        for step in range(4):
            model[4].weight.requires_grad_(step < 2)
            train(model, optimizer, averager, rank, range(step, step + 1))
            assert averager.gradients.layout.names == ("0.weight",)

    run_ranks(2, work)


@pytest.mark.parametrize("n", [1, 2, 4, 5, 6, 9, 10, 243, 1211])
def test_five_digits_are_packed_in_a_byte(n):
    t = torch.randint(-1, 2, (n,), generator=seeded(n)).to(torch.int8)
    packed = pack((t + 1).byte())
    assert packed.dtype == torch.uint8
    assert packed.numel() == -(-n // 5)
    assert torch.equal(unpacked(packed, n), t.float())


def test_all_243_bytes_are_read_back():
    values = torch.arange(243)
    digits = (values.unsqueeze(1) // torch.tensor([1, 3, 9, 27, 81]) % 3 - 1).to(torch.int8)
    packed = pack((digits + 1).byte().view(-1))
    assert torch.equal(packed.long(), values)
    assert torch.equal(unpacked(packed, 5 * 243), digits.view(-1).float())


def test_a_step_exchanges_scalers_then_digits():
    def work(rank, group):
        model = Table()
        train(model, *averaged(model, group, terngrad()), rank, 2, prescribed_loss)

    with checked_collectives(2) as log:
        run_ranks(2, work)
    digits = 4 * 2 + -(-660 // 5)
    message = 4 * (9 + 10) + digits
    assert [name for name, _ in log[0]] == [ALL_GATHER] * 2 + ["all_reduce", ALL_GATHER] * 2
    [_, _, (_, scalers), (_, gathered), *_] = log[0]  # after what the first step asks of the other ranks
    assert scalers == 4 * 2
    assert message <= gathered <= message + 4


def test_the_bytes_exchanged_are_what_was_sent():
    def work(rank, group):
        model = Table()
        _, averager = averaged(model, group, terngrad())
        sent = note_sent(averager)
        model.matrix.grad = normal(300, seed=rank).view(12, 25)
        averager.average()
        averager.commit()
        return sent[0]["matrix"]

    with recorded_bytes(2) as log:
        ranks = run_ranks(2, work)
    for sent, (*_, message) in zip(ranks, log, strict=True):
        payload = torch.tensor(list(message[4 * 19 :]), dtype=torch.uint8)
        scaler, digits = payload[4 + 360 // 5 :][: 4 + 300 // 5].split([4, 300 // 5])  # behind those of the kernel
        assert torch.equal(unpacked(digits, 300).view(12, 25) * scaler.view(torch.float32), sent.float())


def test_a_tensor_is_padded_to_four_bytes():
    layout = Layout(("a", "b"), ((1, 1), (1, 2)))
    assert dict(terngrad().messages(layout))["gather"] == 2 * 4 + 2 * 4
