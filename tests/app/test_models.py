"""Networks: with stems for small images, torchvision's, timm's, and the user's."""

import sys
from types import SimpleNamespace

import pytest
import torch
from hydra.utils import instantiate
from torch import nn

from lightning_gradcomp.app.compose import check_sharding
from lightning_gradcomp.app.models import NETWORKS, resnet18, swin_mini, swin_t
from lightning_gradcomp.app.muon import blocks
from tests.app.conftest import built, composed

GREY = {"channels": 1, "classes": 10, "size": 8}


def network(*words, **images):
    return instantiate(composed(*words).model, _convert_="all")(**images)


def test_a_small_swin_has_shifted_windows():
    model = swin_mini(**GREY)
    logits = model(torch.randn(4, 1, 8, 8))
    assert logits.shape == (4, 10)
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.features[1](torch.randn(1, 8, 8, 48)).shape == (1, 8, 8, 48)
    assert 250_000 < sum(parameter.numel() for parameter in model.parameters()) < 400_000


@pytest.mark.parametrize(
    ("name", "images", "parameters"),
    [
        ("resnet18", GREY, 11_172_810),
        ("resnet50", GREY, 23_519_690),
        ("resnet18", {"channels": 3, "classes": 1000, "size": 224}, 11_689_512),
        ("swin_t", {"channels": 3, "classes": 10, "size": 32}, 27_503_200),
        ("swin_t", {"channels": 3, "classes": 1000, "size": 224}, 28_288_354),
    ],
)
def test_stems_follow_the_size_of_the_images(name, images, parameters):
    with torch.device("meta"):
        model = NETWORKS[name](**images)
        assert model(torch.empty(2, images["channels"], *2 * [images["size"]])).shape == (2, images["classes"])
    assert abs(sum(parameter.numel() for parameter in model.parameters()) / parameters - 1) < 1e-3
    if name.startswith("resnet") and images["size"] == 8:
        assert (model.conv1.kernel_size, model.conv1.stride) == ((3, 3), (1, 1))


@pytest.mark.parametrize(
    ("stem", "size", "positions"), [("imagenet", 28, 7), ("small", 28, 28), ("small", 72, 72), ("auto", 72, 18)]
)
def test_a_stem_is_chosen(stem, size, positions):
    with torch.device("meta"):
        model = resnet18(channels=1, classes=10, size=size, stem=stem)
        inputs = []
        model.layer1.register_forward_pre_hook(lambda module, given: inputs.append(given[0].shape))
        assert model(torch.empty(2, 1, size, size)).shape == (2, 10)
    assert inputs == [(2, 64, positions, positions)]


def test_a_small_swin_has_patches_and_windows():
    model = swin_mini(channels=1, classes=10, size=28, patch=2, window=7)
    assert model.features[0](torch.randn(1, 1, 28, 28)).shape == (1, 14, 14, 48)
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    biases = [table.shape[0] for name, table in model.named_parameters() if name.endswith("bias_table")]
    assert biases == [13 * 13] * 4


@pytest.mark.parametrize(
    ("make", "option", "allowed"),
    [
        (resnet18, {"stem": "large"}, "auto, small, imagenet"),
        (swin_mini, {"patch": 0}, "a whole number from 1 to 28"),
        (swin_mini, {"window": 29}, "a whole number from 1 to 28"),
    ],
)
def test_a_wrong_option_of_a_network_is_refused(make, option, allowed):
    [(name, value)] = option.items()
    with pytest.raises(ValueError, match=rf"^model\.{name}: got {value!r}, allowed: {allowed}"):
        make(channels=1, classes=10, size=28, **option)


@pytest.mark.parametrize(("make", "size"), [(swin_mini, 224), (swin_t, 8)])
def test_images_of_a_wrong_size_are_refused(make, size):
    with pytest.raises(ValueError, match=rf"^model with images of {size} pixels: got 'swin_"):
        make(channels=3, classes=2, size=size)


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "googlenet"])
def test_any_classifier_of_torchvision(name):
    with torch.device("meta"):
        made = network("model=torchvision", f"model.name={name}", channels=3, classes=7, size=224)
        assert made(torch.empty(2, 3, 224, 224)).shape == (2, 7)


def test_options_reach_torchvision():
    words = ("model=torchvision", "model.name=swin_t", "+model.dropout=0.25")
    with torch.device("meta"):
        made = network(*words, channels=3, classes=2, size=224)
    assert any(isinstance(module, nn.Dropout) and module.p == 0.25 for module in made.modules())
    with pytest.raises(ValueError, match="images of 1 channel: got 'vgg11', allowed: images of 3"):
        network("model=torchvision", "model.name=vgg11", **GREY)


def test_timm_is_asked(monkeypatch):
    asked = {}
    stand_in = SimpleNamespace(
        is_model=lambda name: name == "vit", create_model=lambda name, **more: asked.update(more)
    )
    monkeypatch.setitem(sys.modules, "timm", stand_in)
    network("model=timm", "model.name=vit", "+model.drop_path_rate=0.1", channels=1, classes=5, size=224)
    assert asked == {"pretrained": False, "num_classes": 5, "in_chans": 1, "drop_path_rate": 0.1}
    with pytest.raises(ValueError, match=r"model\.name with model=timm: got 'resnext'"):
        network("model=timm", "model.name=resnext", **GREY)


def test_a_network_of_ones_own(monkeypatch, tmp_path):
    (tmp_path / "my_nets.py").write_text(
        "from torch import nn\n"
        "def perceptron(width):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = built("model=custom", "model._target_=my_nets.perceptron", "+model.width=5").task
    assert task(torch.zeros(3, 1, 8, 8)).shape == (3, 10) and task.model[1].out_features == 5


@pytest.mark.parametrize(
    ("name", "number", "kinds"),
    [
        ("swin_t", 15, {"SwinTransformerBlock", "PatchMerging"}),
        ("resnet18", 8, {"BasicBlock"}),
        ("resnet50", 16, {"Bottleneck"}),
    ],
)
def test_blocks_that_are_sharded_by_themselves(name, number, kinds):
    found = list(blocks(NETWORKS[name](channels=3, classes=10, size=32)))
    assert len(found) == number and {type(block).__name__ for block in found} == kinds
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8)))
    assert not list(blocks(layers))


def test_powersgd_is_refused_where_a_shard_is_too_small():
    """Swin-T's last layer has 10 rows: 5 and 5, or 3, 3, 3 and 1."""
    words = ("recipe=swin_t_hsdp", "compressor=powersgd")
    assert built(*words, "strategy.shard=2")
    with pytest.raises(ValueError, match=r"PowerSGD\(rank=4\): got \"a shard of 'model.head.weight' with 1\""):
        built(*words, "strategy.shard=4")


def test_a_scalar_parameter_is_refused_for_shards():
    task = built("model=swin_mini").task
    task.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"^the shape of parameter 'scale' with strategy=hsdp: got \(\)"):
        check_sharding(task, built("compressor=powersgd").trainer.strategy.compressor, 2)


def test_memory_format_and_compilation_reach_the_network(monkeypatch):
    """Compilation itself takes seconds, even of nothing."""
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda module: compiled.append(module))
    run = built("task.channels_last=true", "task.compile=true")
    weight = run.task.model.layer1[0].conv1.weight
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    run.task.trainer, run.trainer.state.fn = run.trainer, "fit"
    run.task.configure_model()
    assert compiled == [run.task.model]
    assert isinstance(resnet18(**GREY).maxpool, nn.Identity)
