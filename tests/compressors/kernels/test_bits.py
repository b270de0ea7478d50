"""Passes over many elements do on a CPU, with numpy, what a few plain words of torch say."""

import pytest
import torch

from lightning_gradcomp.compressors.kernels.bits import at_least, interleave, look_up
from tests.compressors.books import normal


def test_at_least_is_greater_or_equal():
    nothing = float("nan")
    x = torch.tensor([-1.0, -0.0, 0.0, 0.5, 1.0, float("inf"), nothing])
    for bound in (0, 0.5, torch.tensor(0.5), torch.tensor(float("inf"))):
        assert torch.equal(at_least(x, bound), x >= bound)
    assert at_least(x.view(1, 7), 0).shape == (1, 7)


def test_a_bound_is_compared_in_fp32():
    tenth = torch.tensor([0.1])
    assert at_least(tenth, 0.1).tolist() == [True]  # 0.1 in fp64 is a little less than in fp32, and 0.7 a little more
    assert at_least(torch.tensor([0.7]), 0.7).tolist() == [True]


@pytest.mark.parametrize("width", [4, 5, 8])
def test_looked_up_rows_lie_end_to_end(width):
    table = normal(256 * width).view(256, width)
    packed = torch.tensor([3, 0, 255, 3], dtype=torch.uint8)
    assert torch.equal(look_up(table, packed), torch.cat([table[3], table[0], table[255], table[3]]))


@pytest.mark.parametrize("n", [1, 3, 4, 7, 8, 9, 1000])
def test_interleaved_bits_are_read_back_in_turn_from_the_highest(n):
    first, second = normal(n, seed=1) > 0, normal(n, seed=2) > 0
    packed = interleave(first, second)
    assert packed.dtype == torch.uint8
    assert packed.numel() == 2 * -(-n // 8)
    bits = (packed.unsqueeze(1) >> torch.arange(7, -1, -1)) & 1
    pairs = bits.view(-1, 2)
    assert torch.equal(pairs[:n, 0].bool(), first)
    assert torch.equal(pairs[:n, 1].bool(), second)
    assert not pairs[n:].any()
