"""The example of docs/write-a-compressor.md is complete: executed as it stands, it is a strategy that trains."""

import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

import lightning_gradcomp as lgc
from lightning_gradcomp import registry
from tests.threads import run_ranks

PAGE = Path(__file__).parents[1] / "docs" / "write-a-compressor.md"


@pytest.fixture
def mean_sign(monkeypatch):
    monkeypatch.setattr(registry, "_TABLE", dict(registry._TABLE))
    [example] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {"__name__": "example"}
    exec(example, names)
    yield names["MeanSign"]
    StrategyRegistry.remove("meansign")


def test_the_example_compressor_is_a_strategy_and_learns(mean_sign):
    assert "meansign" in StrategyRegistry

    def work(rank, group):
        generator = torch.Generator().manual_seed(rank)
        model = torch.nn.Linear(64, 32)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        averager = lgc.GradientAverager(model, "meansign", optimizer=optimizer, process_group=group)
        for _ in range(200):
            inputs = torch.randn(16, 64, generator=generator)
            optimizer.zero_grad()
            loss = (model(inputs) - inputs[:, :32]).square().mean()
            loss.backward()
            averager.step()
        return loss.item(), averager.stats.ratio

    (loss, ratio), _ = run_ranks(2, work)
    assert loss < 0.1
    assert ratio > 20
