"""Dense averages: fp16 saturates, infinities and NaN are passed on, rounding is that of the format."""

import math

import pytest
import torch

from lightning_gradcomp.averaging.exchange import to_wire
from lightning_gradcomp.compressors import Int8
from tests.averaging.workers import Table, averaged, backward, conv_net, prescribed_loss, train, train_ddp, weights
from tests.threads import run_ranks

LARGEST = 65504.0


def average_of(compressor, *values, grad_scale=1.0):
    """The average, as each rank sees it, of a gradient whose elements are all values[rank] on each rank."""

    def work(rank, group):
        model = Table()
        _, averager = averaged(model, group, compressor)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, values[rank])
        averager.average(grad_scale=grad_scale)
        averager.commit()
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()])

    ranks = run_ranks(len(values), work)
    assert all(torch.equal(seen.nan_to_num(-1), ranks[0].nan_to_num(-1)) for seen in ranks)
    # gloo adds in another order in each part of a buffer, which rounds differently
    return float(max(ranks[0], key=abs))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("value", [65504.0, 66000.0, -1e5, 3e38, -3e38])
def test_fp16_saturates_near_its_largest_number(value, world):
    seen = average_of("fp16", *[value] * world)
    assert math.isfinite(seen)
    assert math.copysign(1, seen) == math.copysign(1, value)
    assert 0.99 * LARGEST <= abs(seen) <= LARGEST


def test_fp16_saturates_each_rank_for_itself():
    assert average_of("fp16", 1e6, -1e6) == 0
    assert average_of("fp16", 1e6, 0.0) == pytest.approx(LARGEST / 2, rel=0.01)


@pytest.mark.parametrize("world", [2, 3, 5, 7, 11, 13, 24, 64, 100, 1000])
def test_saturated_fp16_does_not_overflow_on_many_ranks(world):
    """Added one by one, as in a ring, and pairwise, as in a tree."""
    part = to_wire(torch.tensor([3.4e38, -3.4e38]), world, "fp16", True)
    one_by_one = part.clone()
    for _ in range(world - 1):
        one_by_one += part
    assert bool(torch.isfinite(one_by_one).all())
    parts = [part] * world
    while len(parts) > 1:
        parts = [sum(parts[i : i + 2]) for i in range(0, len(parts), 2)]
    assert bool(torch.isfinite(parts[0]).all())


@pytest.mark.parametrize("compressor", ["none", "fp16", "bf16"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_infinities_and_nan_are_passed_on(compressor, value):
    seen = average_of(compressor, 1.0, value)
    assert seen == value or (math.isnan(seen) and math.isnan(value))


def test_infinities_that_cancel_are_not_numbers():
    assert math.isnan(average_of("fp16", math.inf, -math.inf))


def test_under_a_loss_scale_fp16_overflows():
    """A GradScaler has to see it."""
    scale = 65536.0
    assert not math.isfinite(average_of("fp16", 4.0 * scale, 0.0, grad_scale=scale))
    assert average_of("fp16", 0.5 * scale, 0.25 * scale, grad_scale=scale) == 0.375 * scale


@pytest.mark.parametrize(("compressor", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_on_two_ranks_halves_are_rounded_and_added(compressor, dtype):
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, compressor)
        backward(model, optimizer, rank, 0, prescribed_loss)
        own = model.kernel.grad.clone()
        averager.average()
        averager.commit()
        return own, model.kernel.grad

    (first, seen), (second, _) = run_ranks(2, work)
    expected = ((first / 2).to(dtype).float() + (second / 2).to(dtype).float()).to(dtype).float()
    assert torch.equal(seen, expected)
    assert not torch.equal(seen, (first + second) / 2)


@pytest.mark.parametrize(("compressor", "error"), [("none", 0.0), ("fp16", 2**-10), ("bf16", 2**-7)])
def test_an_average_is_within_the_formats_rounding(compressor, error):
    for values in ((1.0, 1.0), (1.0 / 3, 1.0 / 3), (1e-3, -3e-3, 1e-2), (1234.567, 1.0)):
        mean = sum(values) / len(values)
        largest = max(abs(value) for value in values)
        assert average_of(compressor, *values) == pytest.approx(mean, rel=0, abs=(2 * error + 1e-6) * largest)


def test_small_numbers_underflow_in_fp16_not_in_bf16():
    assert average_of("fp16", 2.0**-20, 2.0**-20) == 2.0**-20
    assert average_of("fp16", 2.0**-30, 2.0**-30) == 0
    assert average_of("bf16", 2.0**-100, 2.0**-100) == 2.0**-100


@pytest.mark.parametrize(("compressor", "most"), [("fp16", 1e-3), ("bf16", 2e-2), (Int8(min_elements=40), 2e-2)])
def test_it_trains_nearly_as_ddp_does(compressor, most):
    def ours(rank, group):
        model = conv_net()
        train(model, *averaged(model, group, compressor), rank, 20)
        return weights(model)

    def ddp(rank, group):
        model = conv_net()
        train_ddp(model, averaged(model, group)[0], group, rank, 20)
        return weights(model)

    got, expected = run_ranks(2, ours), run_ranks(2, ddp)
    assert torch.equal(got[0], got[1])
    assert 0 < float((got[0] - expected[0]).abs().max()) < most
