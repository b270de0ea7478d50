"""The virtual clock of benchmarks.async_accuracy."""

import pytest
import torch
from torch import nn

from benchmarks import async_accuracy
from benchmarks.async_accuracy import Case, Compensated, Training
from lightning_gradcomp import NoCompression
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.parameter_server.messages import PUSH, Request
from lightning_gradcomp.parameter_server.partition import parts


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(async_accuracy, "EPOCHS", 1)
    monkeypatch.setitem(async_accuracy.NETWORKS, "linear", lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))


def trained(**options):
    training = Training(Case("", "dgc:sparsity=0.9;min_elements=64", **options), "linear", 0)
    training.run()
    return training


def test_a_run_is_the_same_every_time():
    one, other = (trained(seconds=(0.25, 1.0, 1.0, 1.0), staleness=4) for _ in range(2))
    assert one.accuracy == other.accuracy > 0.5 and one.staleness == other.staleness
    weights = (list(training.shard.weights.values()) for training in (one, other))
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))


def test_the_clock():
    pushes = 4 * 22
    assert trained().seconds == pushes / 4
    assert trained(seconds=(0.25, 1.0, 1.0, 1.0)).seconds == pytest.approx(pushes / 7, abs=1)
    assert trained(seconds=(0.25, 1.0, 1.0, 1.0), staleness=0).seconds == pushes / 4
    assert trained(age=7).staleness == [*range(7), *(pushes - 7) * [7]]


def test_delay_compensation_is_the_papers():
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    part, *_ = parts(Layout.of([]), Layout.of([("w", weight)]), 1)
    shard = Compensated({"w": weight}, part, torch.optim.SGD([weight], lr=0.1), NoCompression())
    shard.factor, shard.pulled = 2.0, {0: torch.tensor([0.5, -2.0])}
    g = torch.tensor([3.0, 4.0])
    shard.push(Request(PUSH, 0, 0, 0, (0.1,)), g.view(torch.uint8))
    compensated = g + 2 / (0.05 * g**2 + 1e-7).sqrt() * g**2 * torch.tensor([0.5, 0.0])
    assert torch.allclose(shard.weights["w"], torch.tensor([1.0, -2.0]) - 0.1 * compensated)
