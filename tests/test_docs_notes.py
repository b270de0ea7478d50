"""docs/notes.py and the notebook show the ideas of docs/from_the_notes.md; here on a network of a thousand weights."""

import copy
import json
import sys

import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn

from docs import notes
from tests.pages import DOCS


@pytest.fixture(scope="module")
def training():
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 32, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    images, labels = torch.randn(64, 1, 8, 8, generator=generator), torch.randint(10, (64,), generator=generator)
    return notes.Training(model, images, labels, layer="1.weight", batch=2)


@pytest.mark.parametrize("name", notes.IDEAS)
def test_an_idea_is_shown(name, training):
    lines = notes.shown(notes.IDEAS[name](copy.deepcopy(training))).splitlines()
    assert len(lines) > 4
    assert max(map(len, lines)) <= 120


def test_what_is_sent_and_what_is_left_are_the_gradient(training):
    gradient = training.gradient(0)[training.layer]
    for compressor in (notes.lgc.OneBit(), notes.lgc.TwoBit(), notes.lgc.GradientDropping()):
        sender = notes.Sender(compressor, gradient)
        together = sender.send(gradient) + sender.residual
        assert notes.error(together, gradient) < 1e-3


@pytest.fixture
def drawing(monkeypatch, tmp_path):
    """In a folder of its own, without a screen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    plt.switch_backend("agg")
    yield
    plt.close("all")


def test_the_notebook_shows_what_it_says(drawing):
    names = {}
    for number, cell in enumerate(json.loads((DOCS / "examples" / "compression.ipynb").read_text())["cells"]):
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            exec(compile("".join(cell["source"]), f"compression.ipynb, cell {number}", "exec"), names)
    assert len(plt.get_fignums()) == 6
    with_residual, without = zip(*(names["missing"][name] for name in names["methods"]), strict=True)
    assert max(with_residual) < min(without)
    for points in names["lines"].values():
        bits, errors = zip(*points, strict=True)
        assert list(bits) == sorted(bits) and list(errors) == sorted(errors, reverse=True)
