"""A compressed step of ResNet-50 launches few kernels on a GPU. Counted without one."""

import pytest
import torch

import lightning_gradcomp as lgc
from tests.gpu import test_no_host_sync

launches = pytest.importorskip("benchmarks.launches")
pytestmark = test_no_host_sync.pytestmark


@pytest.mark.parametrize(
    ("compressor", "optimizer", "most"),
    [
        (lgc.DGC(), "SGD", 120),
        (lgc.DGC(), "AdamW", 157),
        (lgc.GradientDropping(), "SGD", 58),
        (lgc.OneBit(), "SGD", 62),
        (lgc.TwoBit(), "SGD", 60),
        (lgc.TernGrad(), "SGD", 68),
        (lgc.PowerSGD(), "SGD", 152),
    ],
)
def test_a_step_of_resnet50(compressor, optimizer, most):
    assert 20 < launches.of_a_step(compressor, optimizer) <= most


@pytest.mark.parametrize(
    ("compressor", "world", "most"),
    [(lgc.Int8(), 2, 48), (lgc.Int8(), 4, 95), (lgc.EDEN(), 2, 83), (lgc.EDEN(), 4, 148), (lgc.EDEN(bits=2), 2, 85)],
)
def test_a_bucket_in_few_bits(compressor, world, most):
    assert 20 < launches.of_a_bucket(compressor, world) <= most


def test_an_operation_of_torch_counts_once():
    with launches.counting() as counted, counted:
        x = torch.zeros(8, device="cuda")  # one
        x[2:4].add_(1)  # a view, and one
    assert counted.count == 2
