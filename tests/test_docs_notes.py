"""docs/notes.py shows every idea of docs/from_the_notes.md; here on a network of a thousand weights."""

import copy

import pytest
import torch
from torch import nn

from docs import notes


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
