"""Packing, comparisons and table look-ups: numpy on a CPU gives what torch would."""

import pytest
import torch

from lightning_gradcomp.compressors.kernels.bits import greater_equal, interleave, look_up, pack_bits, unpack_bits
from tests.compressors.one_worker import normal


def test_greater_equal_is_torchs():
    x = torch.tensor([-1.0, -0.0, 0.0, 0.5, 1.0, float("inf"), float("nan")])
    for bound in (0, 0.5, torch.tensor(0.5), torch.tensor(float("inf"))):
        assert torch.equal(greater_equal(x, bound), x >= bound)
    assert greater_equal(x.view(1, 7), 0).shape == (1, 7)


def test_a_bound_is_compared_in_fp32():
    """In fp64, 0.1 is a little less than in fp32, and 0.7 a little more."""
    for number in (0.1, 0.7):
        assert greater_equal(torch.tensor([number]), number).tolist() == [True]


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1000])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_packed_bits_are_read_back(n, dtype):
    bits = (normal(n) > 0).to(dtype)
    packed = pack_bits(bits.view(1, n))
    assert packed.dtype == torch.uint8
    assert packed.shape == (-(-n // 8),)
    assert torch.equal(unpack_bits(packed, n), bits.byte())


def test_the_first_bit_is_the_lowest():
    assert pack_bits(torch.tensor([1, 0, 1, 1, 0, 0, 0, 0, 1]) > 0).tolist() == [0b1101, 1]


@pytest.mark.parametrize("width", [4, 5, 8])
def test_looked_up_rows_lie_end_to_end(width):
    table = normal(256 * width).view(256, width)
    packed = torch.tensor([3, 0, 255, 3], dtype=torch.uint8)
    assert torch.equal(look_up(table, packed), torch.cat([table[3], table[0], table[255], table[3]]))


@pytest.mark.parametrize("n", [1, 3, 4, 7, 8, 9, 1000])
def test_interleaved_bits_alternate_from_the_highest(n):
    first, second = normal(n, seed=1) > 0, normal(n, seed=2) > 0
    packed = interleave(first, second)
    assert packed.dtype == torch.uint8
    assert packed.numel() == 2 * -(-n // 8)
    bits = (packed.unsqueeze(1) >> torch.arange(7, -1, -1)) & 1
    pairs = bits.view(-1, 2)
    assert torch.equal(pairs[:n, 0].bool(), first)
    assert torch.equal(pairs[:n, 1].bool(), second)
    assert not pairs[n:].any()
