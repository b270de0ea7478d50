"""Networks beyond our own: torchvision's classifiers, timm's, and the user's."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_gradcomp.app.models import build
from lightning_gradcomp.app.options import training
from tests.app.test_compose import run_of


@pytest.mark.parametrize("name", ["swin_s", "mobilenet_v3_small", "googlenet", "vit_b_16"])
def test_any_classifier_of_torchvision(name):
    model = run_of("model=torchvision", f"model.name={name}", "data=imagefolder").model
    with torch.device("meta"):
        network = build(model, channels=3, classes=7, size=224)
        assert network(torch.empty(2, 3, 224, 224)).shape == (2, 7)


def test_options_reach_torchvision():
    model = run_of("model=torchvision", "model.name=swin_t", "++model.options.dropout=0.25").model
    with torch.device("meta"):
        assert any(isinstance(m, nn.Dropout) and m.p == 0.25 for m in build(model, channels=3, classes=2).modules())


def test_what_torchvision_lacks_is_refused():
    model = run_of("model=torchvision", "model.name=vgg99").model
    with pytest.raises(ValueError, match=r"model\.name with model=torchvision: got 'vgg99', allowed: alexnet, "):
        build(model, channels=3, classes=2)
    model.name, model.options = "vgg11", {"height": 5}
    with pytest.raises(ValueError, match=r"^model\.options: got {'height': 5}, allowed: keyword arguments of vgg11: "):
        build(model, channels=3, classes=2)
    with pytest.raises(ValueError, match="images of 1 channel: got 'vgg11', allowed: images of 3"):
        build(model, channels=1, classes=2)


def test_timm_is_asked_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(training, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^needs a package for model=timm: pip install timm"):
        run_of("model=timm", "model.name=vit_tiny_patch16_224")
    monkeypatch.setattr(training, "find_spec", lambda name: name)
    asked = {}
    stand_in = SimpleNamespace(
        is_model=lambda name: name == "vit", create_model=lambda name, **more: asked.update(more)
    )
    monkeypatch.setitem(sys.modules, "timm", stand_in)
    build(run_of("model=timm", "model.name=vit", "++model.options.drop_path_rate=0.1").model, channels=1, classes=5)
    assert asked == {"pretrained": False, "num_classes": 5, "in_chans": 1, "drop_path_rate": 0.1}
    with pytest.raises(ValueError, match=r"model\.name with model=timm: got 'resnext'"):
        build(run_of("model=timm", "model.name=resnext").model, channels=3, classes=5)


def test_a_network_of_ones_own(monkeypatch, tmp_path):
    (tmp_path / "my_nets.py").write_text(
        "from torch import nn\n"
        "def perceptron(width):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    model = run_of("model=custom", "model.target=my_nets:perceptron", "++model.options={width: 5}").model
    network = build(model, channels=1, classes=10, size=8)
    assert network(torch.zeros(3, 1, 8, 8)).shape == (3, 10) and network[1].out_features == 5
    model.options = {"height": 5}
    with pytest.raises(ValueError, match=r"^model\.options: got {'height': 5}, allowed: .* of my_nets:perceptron: "):
        build(model, channels=1, classes=10)
    for target in ("my_nets:other", "no_such_module:Net"):
        model.target = target
        with pytest.raises(ValueError, match=f"model.target: got '{target}', allowed: module:Name"):
            build(model, channels=1, classes=10)
