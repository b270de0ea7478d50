"""Rotated blocks: the bytes of a paper-like twin, known errors, unbiased, and exact where it must be."""

import numpy as np
import pytest
import torch

from lightning_gradcomp.compressors.kernels import eden
from lightning_gradcomp.compressors.kernels.eden import (
    BLOCK,
    GAIN,
    add_eden,
    eden_bytes,
    pack_eden,
    rotation,
    unpack_eden,
)
from lightning_gradcomp.compressors.kernels.rng import seed_of
from tests.reference import eden as reference

CPU = torch.device("cpu")
ERRORS = {1: 0.5642, 2: 0.1282, 3: 0.0337, 4: 0.00895}
"""Mean squared error of blocks of 64 with Lloyd and Max's levels, as a share of their squared norm."""


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def packed(y, bits, seed=1):
    seeds = torch.randint(-(2**31), 2**31, (y.numel() // BLOCK,), generator=seeded(seed), dtype=torch.int32)
    return pack_eden(y, torch.empty(eden_bytes(y.numel(), bits), dtype=torch.uint8), bits, seeds)


def there_and_back(x, bits, step):
    turn = rotation(CPU, step)
    return unpack_eden(packed((x.view(-1, BLOCK) @ turn).view(-1), bits, step), turn, torch.empty_like(x), bits)


def heavy_tailed(blocks):
    return torch.randn(blocks * BLOCK, generator=seeded(0)) * torch.rand(blocks * BLOCK, generator=seeded(1)) ** 4


def test_the_rotation_is_the_twins_and_orthogonal():
    turn = rotation(CPU, 3, 5)
    drawn = np.random.SFC64(seed_of(3, 5)).random_raw(3).view(np.uint8)
    np.testing.assert_array_equal(turn.numpy(), reference.rotation(np.unpackbits(drawn).reshape(3, BLOCK)))
    assert torch.equal(turn @ turn.T, GAIN * torch.eye(BLOCK))
    assert not torch.equal(turn, rotation(CPU, 3, 6))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_packing_is_byte_identical_to_the_twin(bits, monkeypatch):
    """On whole numbers, whose sums are exact in fp32 in any order. In a chunk of four blocks and one of two."""
    monkeypatch.setattr(eden, "CHUNK", 4 * BLOCK)
    y = torch.randint(-300, 300, (6 * BLOCK,), generator=seeded(bits)).float() * 2.0**-20
    y[BLOCK : 2 * BLOCK] = 0
    y[2 * BLOCK : 3 * BLOCK - 1] = 0  # a single entry
    found = [reference.quantise(block, bits) for block in y.view(-1, BLOCK).numpy()]
    seeds = torch.randint(-(2**31), 2**31, (6,), generator=seeded(12345), dtype=torch.int32).tolist()
    scales = [reference.to_bf16(scale, seed) for (_, scale), seed in zip(found, seeds, strict=True)]
    expected = reference.packed(np.stack([levels for levels, _ in found]), scales, bits)
    assert packed(y, bits, 12345).numpy().tobytes() == expected
    total = torch.ones_like(y)
    add_eden(packed(y, bits, 12345), total, bits)
    decoded = np.stack([levels * scale for (levels, _), scale in zip(found, scales, strict=True)])
    np.testing.assert_array_equal(total.numpy(), 1 + decoded.astype(np.float32).ravel())


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_error_is_a_known_share_of_the_norm_and_averages_out(bits):
    x, rounds = heavy_tailed(200), 200
    total, error = torch.zeros_like(x), 0.0
    for step in range(rounds):
        decoded = there_and_back(x, bits, step)
        total += decoded
        error += float((decoded - x).square().sum() / x.square().sum()) / rounds
    assert error == pytest.approx(ERRORS[bits], rel=0.02)
    left = float((total / rounds - x).square().sum() / x.square().sum())
    assert left == pytest.approx(error / rounds, rel=0.05)  # no more than the mean of independent errors


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_zero_blocks_are_exact_and_blocks_that_are_not_finite_become_nan(bits):
    x = torch.ones(4, BLOCK)
    x[0], x[1, 7], x[2, 9] = 0, torch.nan, -torch.inf
    decoded = there_and_back(x.view(-1), bits, 4).view(4, BLOCK)
    assert not decoded[0].any()
    assert decoded[1:3].isnan().all()
    assert decoded[3].isfinite().all()
    rotated = torch.zeros(BLOCK)
    rotated[9] = -torch.inf  # an overflow in the rotation
    add_eden(packed(rotated, bits, 4), total := torch.zeros(BLOCK), bits)
    assert total.isnan().all()


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("scale", [1e-36, 1.0, 1e33])
def test_a_block_with_a_single_entry_is_exact_up_to_the_scale(bits, scale):
    x = torch.zeros(BLOCK)
    x[5] = scale
    mean = torch.stack([there_and_back(x, bits, step) for step in range(400)]).double().mean(0)
    torch.testing.assert_close(mean[5].item(), scale, rtol=0.05, atol=0)


def test_scales_are_rounded_without_bias():
    x = torch.zeros(BLOCK)
    x[0] = 1.003
    turn = rotation(CPU, 1)
    y = (x.view(1, -1) @ turn).view(-1)
    found = [unpack_eden(packed(y, 4, key), turn, torch.empty_like(x), 4) @ x / (x @ x) for key in range(1000, 3000)]
    spread = torch.stack(found).std() / len(found) ** 0.5
    assert abs(float(torch.stack(found).mean()) - 1) < 4 * float(spread) + 1e-6
    assert float(spread) > 0


def test_values_do_not_depend_on_what_is_packed_beside_them():
    y = torch.randn(40 * BLOCK, generator=seeded(3))
    whole, part = torch.zeros_like(y), torch.zeros(7 * BLOCK)
    seeds = torch.arange(40, dtype=torch.int32) * 1_000_003
    for blocks, total in ((slice(0, 40), whole), (slice(5, 12), part)):
        values = y.view(-1, BLOCK)[blocks].flatten()
        message = torch.empty(eden_bytes(values.numel(), 3), dtype=torch.uint8)
        add_eden(pack_eden(values, message, 3, seeds[blocks]), total, 3)
    assert torch.equal(whole[5 * BLOCK : 12 * BLOCK], part)
