"""Formats of values: the announced length, rounding within the format's precision, no infinities."""

import pytest
import torch

from lightning_gradcomp.compressors import DGC, GradientDropping
from lightning_gradcomp.compressors.kernels.formats import BITS, GROUP, pack_values, unpack_values, value_bytes

LENGTHS = [1, 2, 255, 256, 257, 1000]
LARGEST = torch.finfo(torch.float32).max
NEAR = {"fp32": 0.0, "bf16": 2**-8, "fp16": 2**-11}
"""Half a unit in the last place, relative."""


def written_and_read(v, values):
    packed = pack_values(v, values)
    assert packed.dtype == torch.uint8 and packed.numel() == value_bytes(v.numel(), values)
    return unpack_values(packed, v.numel(), values)


def some(k):
    return torch.randn(k, generator=torch.Generator().manual_seed(k))


@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize("values", NEAR)
def test_floats_are_rounded_to_the_nearest(values, k):
    v = some(k)
    assert ((written_and_read(v, values) - v).abs() <= NEAR[values] * v.abs()).all()


@pytest.mark.parametrize("k", LENGTHS)
def test_int8_is_within_half_a_step_of_its_groups_scale(k):
    v = some(k)
    v[: k // 2] *= 1000
    read = written_and_read(v, "int8")
    for group, got in zip(v.split(GROUP), read.split(GROUP), strict=True):
        assert ((got - group).abs() <= group.abs().max() / 127 * 0.5001).all()


@pytest.mark.parametrize("k", LENGTHS)
def test_int2_writes_the_mean_of_either_half_of_magnitudes(k):
    v = some(k)
    v[: k // 2] *= 1000
    read = written_and_read(v, "int2")
    assert torch.equal(read.sign(), v.sign())
    for group, got in zip(v.double().split(GROUP), read.double().split(GROUP), strict=True):
        above = group.abs() > group.abs().mean()
        for half in (above, ~above):
            if half.any():
                [level] = got[half].abs().unique().tolist()
                assert level == pytest.approx(group[half].abs().mean().item(), rel=2**-8)


@pytest.mark.parametrize("values", BITS)
def test_zeros_stay_zero_and_signs_stay(values):
    v = torch.tensor([0.0, -1.0, 1.0, 0.0])
    assert torch.equal(written_and_read(v, values), v)
    assert torch.equal(written_and_read(torch.zeros(300), values), torch.zeros(300))


@pytest.mark.parametrize("values", BITS)
def test_a_zero_stays_zero_among_others(values):
    """The last group is filled with zeros that don't count as such."""
    v = some(700)
    v[[3, 200, 600]] = 0
    read = written_and_read(v, values)
    assert not read[v == 0].any()
    if values == "int2":
        assert all(bool(group.any()) for group in read.split(GROUP))
        assert bool(written_and_read(some(700), values).all())


@pytest.mark.parametrize("values", BITS)
def test_no_values_are_no_bytes(values):
    assert value_bytes(0, values) == 0
    packed = pack_values(torch.empty(0), values)
    assert packed.numel() == unpack_values(packed, 0, values).numel() == 0


@pytest.mark.parametrize("values", BITS)
def test_the_largest_and_smallest_numbers_stay_finite(values):
    v = torch.tensor([LARGEST, -LARGEST, 1e5, 1e-45, -1e-40])
    read = written_and_read(v, values)
    assert read.isfinite().all()
    assert (read[:2].sign() == v[:2].sign()).all()


@pytest.mark.parametrize("cls", [DGC, GradientDropping])
@pytest.mark.parametrize("option", ["values", "dense_values"])
def test_an_unknown_format_is_refused(cls, option):
    message = rf"{cls.__name__}.{option}: got 'fp8', allowed: 'fp32', 'bf16', 'fp16', 'int8', 'int2'"
    with pytest.raises(ValueError, match=message):
        cls(**{option: "fp8"})
