"""What the docs show is what the package does: the example compressor trains, the table is the registry's."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

import lightning_gradcomp as lgc
from lightning_gradcomp import registry
from tests.threads import run_ranks

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def mean_sign(monkeypatch):
    monkeypatch.setattr(registry, "_TABLE", dict(registry._TABLE))
    [example] = re.findall(r"```python\n(.*?)```", (DOCS / "write-a-compressor.md").read_text(), re.DOTALL)
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


def test_the_table_of_methods_is_what_the_registry_makes_of_it():
    """After a change: python docs/tables.py."""
    assert (DOCS / "compressors.md").read_text() == runpy.run_path(str(DOCS / "tables.py"))["page"]()


def test_every_method_has_a_card_and_a_paragraph():
    page = (DOCS / "compressors.md").read_text()
    for entry in lgc.entries():
        assert all((entry.cls.card.sends, entry.cls.card.pick, entry.cls.card.source)), entry.name
        assert re.search(rf"^## .*`{entry.name}`", page, re.MULTILINE), entry.name
