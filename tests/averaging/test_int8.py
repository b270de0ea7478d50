"""Averages in 8 bits: bit-identical to a simulation, of the bytes announced; not finite if a gradient is not."""

import math

import numpy as np
import pytest
import torch
import torchvision

from lightning_gradcomp.averaging import int8
from lightning_gradcomp.averaging.gradients import Layouts
from lightning_gradcomp.averaging.int8 import mean_in_int8
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.traffic import dense_step_traffic
from lightning_gradcomp.compressors import Int8
from lightning_gradcomp.compressors.kernels.int8 import int8_bytes, pack_int8, unpack_int8
from lightning_gradcomp.compressors.kernels.rng import Dither
from lightning_gradcomp.compressors.layout import Layout
from tests.averaging.workers import (
    Table,
    averaged,
    backward,
    prescribed_loss,
    seeded,
)
from tests.reference import int8 as reference
from tests.threads import checked_collectives, run_ranks

QUICK = {"min_elements": 40}
"""Of a `Table`, the kernel (360 elements) and the matrix (300) then travel in 8 bits."""


@pytest.mark.parametrize(("n", "m"), [(5000, 77), (256, 1), (300, 0), (0, 5), (0, 0), (12 * 256, 12)])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_it_is_bit_identical_to_the_simulation_in_one_process(world, n, m):
    def numbers(rank, k):
        noise = torch.randn(k, generator=seeded(rank, k))
        return noise * noise.abs()

    def work(rank, group):
        large, small = numbers(rank, n), numbers(rank, m)
        return mean_in_int8(group, [large[: n // 3], large[n // 3 :]], [small], 7)  # several tensors are one

    def uniform(rank, phase, begin, n):
        numbers = torch.zeros(begin + n)
        Dither(numbers.device, 7, rank, phase).add_to(numbers)
        return numbers[begin:].numpy()

    expected = reference.mean(*([numbers(rank, k).numpy() for rank in range(world)] for k in (n, m)), uniform)
    for got in run_ranks(world, work):
        assert all(np.array_equal(mean.numpy(), wanted) for mean, wanted in zip(got, expected, strict=True))


def test_rounding_is_unbiased_and_the_largest_stays():
    v = torch.cat([torch.tensor([-1.0, 1.0]), torch.linspace(-0.02, 0.02, 254)]) * 3.7
    total, rounds = torch.zeros(256), 2000
    for step in range(rounds):
        packed = pack_int8(v, torch.empty(int8_bytes(256), dtype=torch.uint8), Dither(v.device, step))
        decoded = unpack_int8(packed, torch.empty(256))
        assert torch.equal(decoded[:2], (v[:2] / 3.7).sign() * 127 * (v[1] / 127))
        total += decoded
    assert float((total / rounds - v).abs().max()) < 5 * 0.5 * 3.7 / 127 / rounds**0.5


@pytest.mark.parametrize("groups", [1, 5, 24])
def test_a_long_part_travels_in_pieces(groups, monkeypatch):
    monkeypatch.setattr(int8, "SHORT", 256)
    large, small = ([torch.randn(k, generator=seeded(rank, k)) for rank in range(2)] for k in (512 * groups - 7, 9))

    def work(rank, group):
        return mean_in_int8(group, [large[rank]], [small[rank]])

    (first, first_small), (second, second_small) = run_ranks(2, work)
    assert torch.equal(first, second)
    assert torch.equal(first_small, second_small)
    torch.testing.assert_close(
        first, sum(large) / 2, rtol=0, atol=2.0 / 127 * float(max(each.abs().max() for each in large))
    )
    torch.testing.assert_close(first_small, sum(small) / 2)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_step_sends_one_message_to_each_owner_and_one_mean_back_and_reports_them(world):
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, Int8(**QUICK))
        averager.check_same_parameters()
        backward(model, optimizer, rank, 0, prescribed_loss)
        before = len(log[rank])
        averager.step()
        return averager.stats, log[rank][before:]

    with checked_collectives(world) as log:
        for stats, exchanged in run_ranks(world, work):
            flags = 4 * math.ceil((19 + 6) / world) - 4 * math.ceil(19 / world)
            assert exchanged == [("isend", stats.bytes_sent // (2 * (world - 1)) + flags)] * 2 * (world - 1)
            assert stats.bytes_sent == stats.bytes_received


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_step_of_resnet50_sends_nearly_four_times_fewer_bytes_than_a_ring(world):
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in torchvision.models.resnet50().named_parameters()}
    large = Int8().choose(shapes)
    taken, left = ({name: shape for name, shape in shapes.items() if (name in large) is it} for it in (True, False))
    layouts = Layouts(
        Layout(tuple(taken), tuple(taken.values())), Layout(tuple(left), tuple(left.values())), torch.device("cpu")
    )
    dense, sent = (dense_step_traffic(layouts, Ranks(None, world), wire) for wire in ("fp32", "int8"))
    assert 3.9 < dense / sent < 4


def gradients(compressor, world, change, **options):
    """Each rank's gradient of a Table after an average, where rank 1 changed its own first."""

    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, compressor)
        backward(model, optimizer, rank, 0, prescribed_loss)
        if rank == 1:
            change(model)
        averager.average(**options)
        averager.commit()
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()])

    first, *others = run_ranks(world, work)
    assert all(torch.equal(first.nan_to_num(-1), other.nan_to_num(-1)) for other in others)
    return first


@pytest.mark.parametrize("grad_scale", [1.0, 65536.0])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["kernel", "bias"])
def test_one_element_that_is_not_finite_is_seen_by_all_ranks(name, value, grad_scale):
    def change(model):
        getattr(model, name).grad.view(-1)[5] = value

    got = gradients(Int8(**QUICK), 3, change, grad_scale=grad_scale)
    bad = ~got.isfinite()
    assert 0 < bad.sum() <= (256 if name == "kernel" else 1)


def test_large_numbers_do_not_overflow():
    largest = torch.finfo(torch.float32).max

    def fill(model):
        for parameter in model.parameters():
            parameter.grad.fill_(largest)

    assert gradients(Int8(**QUICK), 2, fill).isfinite().all()


def test_small_tensors_are_exact_and_the_others_within_half_a_step():
    exact, got = (gradients(compressor, 2, lambda model: None) for compressor in ("none", Int8(**QUICK)))
    large, small = exact[:660].split(256), exact[660:]
    assert torch.equal(small, got[660:])
    errors = [(a - b).abs().max() / a.abs().max() for a, b in zip(large, got[:660].split(256), strict=True)]
    assert 0 < max(errors) < 3 * 0.5 / 127 * 2  # rounded three times, and a rank's largest may be twice the mean's


def test_an_option_out_of_range_is_an_error():
    with pytest.raises(ValueError, match=r"Int8.min_elements: got 0, allowed: a whole number from 1"):
        Int8(min_elements=0)
