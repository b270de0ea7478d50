"""What the docs show is what the package does: their Python runs, their tables are generated from data and code."""

import inspect
import os
import re
from math import ceil, prod
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn

import lightning_gradcomp as lgc
from docs import tables
from lightning_gradcomp import registry
from lightning_gradcomp.compressors.layout import Layout
from tests.pages import PAGES, blocks, prose
from tests.threads import run_ranks

KINDS = {"python", "bash", "toml", "diff", "text", "math"}
"""Blocks of the last four are not code."""


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch, tmp_path):
    """Of what a block registers, a Trainer writes, or a fit joins."""
    monkeypatch.setattr(registry, "_TABLE", dict(registry._TABLE))
    monkeypatch.chdir(tmp_path)
    before = set(StrategyRegistry.available_strategies())
    with mock.patch.dict(os.environ):
        yield
    for name in set(StrategyRegistry.available_strategies()) - before:
        StrategyRegistry.remove(name)
        STRATEGY_REGISTRY.remove(name)
    if dist.is_initialized():
        dist.destroy_process_group()


def provided(tmp_path):
    """What blocks that show a part of a script take for granted."""
    model = nn.Linear(64, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(model, batch):
        return model(batch).square().mean()

    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        "loader": [torch.randn(4, 64) for _ in range(2)],
        "batches": iter([torch.randn(4, 64) for _ in range(2)]),
        "loss": loss,
        "rank": 0,
        "path": tmp_path / "state.pt",
    }


TAKES_FOR_GRANTED = ("README.md", "docs/local_steps.md")
"""All other pages stand alone."""


@pytest.mark.parametrize("page", [page for page in PAGES if any(kind == "python" for kind, _, _ in blocks(page))])
@pytest.mark.filterwarnings("ignore")  # Lightning's advice on Trainers that are made here, and not used
def test_python_of_a_page_runs(page, tmp_path):
    names = {"__name__": "page", **(provided(tmp_path) if page in TAKES_FOR_GRANTED else {})}
    for kind, line, text in blocks(page):
        if kind == "python":
            exec(compile("\n" * (line - 1) + text, str(PAGES[page]), "exec"), names)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_kind_that_is_tested_or_is_no_code(page):
    assert {kind for kind, _, _ in blocks(page)} <= KINDS


@pytest.mark.parametrize("name", ["ef_signsgd", "qsgd"])
def test_an_example_compressor_is_a_strategy_and_learns(name):
    [text] = [text for _, _, text in blocks("docs/research.md") if f'register("{name}")' in text]
    exec(text, {"__name__": "example"})
    assert name in StrategyRegistry
    assert name in STRATEGY_REGISTRY

    def work(rank, group):
        generator = torch.Generator().manual_seed(rank)
        model = torch.nn.Linear(64, 32)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        averager = lgc.GradientAverager(model, name, optimizer=optimizer, process_group=group)
        for _ in range(120):
            inputs = torch.randn(16, 64, generator=generator)
            optimizer.zero_grad()
            loss = (model(inputs) - inputs[:, :32]).square().mean()
            loss.backward()
            averager.step()
        return loss.item(), averager.stats.ratio

    (loss, ratio), _ = run_ranks(2, work)
    assert loss < 0.1
    assert ratio > 3.5


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_of_a_page_are_those_of_today(page):
    """After a change of data, methods or options: python -m docs.tables."""
    text = PAGES[page].read_text()
    assert text == tables.filled(text)


def test_every_method_has_a_card_and_is_on_its_page():
    for entry in lgc.entries():
        assert all((entry.cls.card.sends, entry.cls.card.pick, entry.cls.card.source)), entry.name
        page = f"docs/{tables.page_of(entry.name).partition('#')[0]}"
        text = PAGES[page].read_text()
        for word in (f"lgc.{entry.cls.__name__}", f'"{entry.strategy}"', f"compressor={entry.name}"):
            assert f"`{word}`" in text, f"{page} doesn't name {word}"


ENTRY = re.compile(r"^    (\w+): ", re.MULTILINE)


def described(cls):
    """The options below "Args:" in the docstrings of a class and its bases, which are on the page of the API."""
    found = set()
    for each in cls.__mro__:
        text = inspect.cleandoc(vars(each).get("__doc__") or "")
        section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)
        found |= set(ENTRY.findall(section[1])) if section else set()
    return found


STRATEGIES = ("CompressedDDPStrategy", "DelayedStrategy", "AsyncStrategy", "CompressedHSDPStrategy")


@pytest.mark.parametrize("name", [*STRATEGIES, "LossyCompressor", *(entry.cls.__name__ for entry in lgc.entries())])
def test_every_option_is_described_and_none_besides(name):
    cls = getattr(lgc, name)
    assert described(cls) == set(inspect.signature(cls).parameters)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.25])
def test_the_formulas_of_bytes_are_the_codes(density):
    """Those on the pages of the methods."""
    layout = Layout(("a", "b", "c"), ((64, 3, 3, 3), (512, 512, 3, 3), (10, 513)))
    sizes = layout.sizes

    def sparse(k):
        b = {0.001: 9, 0.01: 6}.get(density)
        return 4 * k + ceil((k * (b + 1) + (layout.n - 1 >> b) if b else layout.n) / 8)

    each = sum(ceil(round(size * density, 6)) for size in sizes)
    together = ceil(round(layout.n * density, 6))
    factors = 4 * 4 * sum(shape[0] + prod(shape[1:]) for shape in layout.shapes)
    payloads = [
        (lgc.DGC(values="fp32"), sparse(each)),
        (lgc.GradientDropping(), sparse(together)),
        (lgc.OneBit(), sum(8 * shape[0] + 4 * ceil(prod(shape) / 32) for shape in layout.shapes)),
        (lgc.OneBit(groups="block"), sum(8 * ceil(size / 512) + 4 * ceil(size / 32) for size in sizes) + 8 + 4),
        (lgc.TwoBit(), sum(4 + 4 * ceil(size / 16) for size in sizes)),
        (lgc.TernGrad(share_scaler=False), sum(4 + 4 * ceil(size / 20) for size in sizes)),
        (lgc.PowerSGD(), factors),
    ]
    for compressor, expected in payloads:
        assert sum(size for _, size in compressor.with_sparsity(1 - density).messages(layout)) == expected, compressor


def test_every_public_name_is_on_the_page_of_the_api():
    page = "docs/api.md"
    assert set(re.findall(r"^::: lightning_gradcomp\.(\w+)", prose(page), re.MULTILINE)) == set(lgc.__all__)
    listed = re.compile(r"^::: lightning_gradcomp\.(\w+)\n.*\n      members: \[(.*)\]", re.MULTILINE)
    for name, members in listed.findall(prose(page)):
        assert all(hasattr(getattr(lgc, name), member) for member in re.findall(r"\w+", members)), name
