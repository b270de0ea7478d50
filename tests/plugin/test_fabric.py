"""Fabric trains with the same averaging. One run of `fabric_script.py` on two ranks serves most tests here."""

import json
import re
from contextlib import nullcontext
from pathlib import Path

import lightning as L
import pytest
import torch

import lightning_gradcomp as lgc
from lightning_gradcomp.averaging import mean_state
from tests.processes import run_world


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fabric")


@pytest.fixture(scope="module")
def outcome(folder):
    output = run_world(2, str(Path(__file__).with_name("fabric_script.py")), str(folder), timeout=120)
    return json.loads(output.splitlines()[-1])


def test_fabric_trains(outcome):
    expected = {"sparsity": 0.996, "steps": 35, "momentum": 0.9, "spread": 0, "learned": True}
    assert outcome["trains"] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["dgc", "onebit", "terngrad", "ddp"])
def test_fabric_goes_on_from_a_checkpoint(outcome, name):
    assert outcome["goes_on"][name] == [0, 0]


def test_fabric_forgets_what_is_not_in_a_checkpoint(outcome):
    assert outcome["goes_on"]["from the start"] == 0


def test_fabric_saves_what_it_has_just_loaded(outcome):
    assert outcome["goes_on"]["saved_again"]


def test_fabric_warns_of_state_it_does_not_restore(outcome):
    assert any("the checkpoint holds the ranks' residuals" in said for said in outcome["goes_on"]["warned"])


def test_fabric_on_one_rank_starts_with_the_mean(outcome, folder):
    strategy = lgc.CompressedFabricStrategy(lgc.DGC(sparsity=0.9, min_elements=32, dense_epochs=0, warmup_epochs=0))
    fabric = L.Fabric(strategy=strategy, accelerator="cpu", devices=1)
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(64, 64), "head": torch.nn.Linear(64, 10)})
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    fabric.launch()
    wrapped, optimizer = fabric.setup(model, sgd)
    fabric.load(folder / "dgc.ckpt", {"model": wrapped, "optimizer": optimizer})
    fabric.backward(sum(parameter.sum() for parameter in model.parameters()), model=wrapped)
    saved = torch.load(folder / "dgc.ckpt", weights_only=True)["lightning_gradcomp"]
    expected = mean_state(saved["ranks"])["memory"]["velocity"]
    got = strategy.averager.state_dict()["memory"]["velocity"]
    assert expected["body.weight"].any() and all(torch.equal(got[name], part) for name, part in expected.items())
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["onebit", "ddp_dense"])
def test_fabric_warns_of_an_optimizer_that_was_set_up_before_its_module(name):
    fabric = L.Fabric(strategy=name, accelerator="cpu", devices=1)
    fabric.launch()
    module = torch.nn.Linear(4, 2)
    warned = pytest.warns(UserWarning, match="no parameter of a module that is set up, so OneBit does not compress its")
    with warned if name == "onebit" else nullcontext():
        fabric.setup_optimizers(torch.optim.SGD(module.parameters(), lr=0.1))
    fabric.setup_module(module)
    torch.distributed.destroy_process_group()


def test_fabric_clips_the_average(outcome):
    clipping = outcome["clipping"]
    assert clipping["apart"] == clipping["spread"] == 0 < clipping["clipped"]


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (
            ("clipping", "dgc"),
            r"Refused: clipping with DGC in Fabric: got 'fabric.clip_gradients', allowed: DGC\(clip_norm=",
        ),
        (
            ("joins", "OneBit"),
            r"Refused: DDP's join\(\) with OneBit: got 'a backward inside it', allowed: the same number of batches",
        ),
        (
            ("joins", "NoCompression"),
            r"Refused: DDP's join\(divide_by_initial_world_size\): got False, allowed: True: a communication hook",
        ),
        (
            ("after_backward", "several"),
            r"Refused: optimizer: got .*SGD.*, allowed: the optimizer that fabric.setup returns",
        ),
    ],
)
def test_fabric_refuses(outcome, got, message):
    said = outcome
    for key in got:
        said = said[key]
    assert re.match(message, said), said


def test_fabric_without_parameters_raises_what_ddp_raises(outcome):
    said = outcome["without_parameters"]
    assert said["onebit"] == said["ddp"] and "doesn't have any parameter" in said["ddp"]


def test_fabric_averages_after_backward(outcome):
    assert outcome["after_backward"]["apart"] == [0, 0]


def test_fabric_discarded_gradients_stay_discarded(outcome):
    body, head = outcome["two_optimizers"]["moved"]
    assert head == 0 < body and outcome["two_optimizers"]["spread"] == 0


def test_fabric_takes_an_optimizer_without_torchs_hooks(outcome):
    """Error feedback is committed by its steps too."""
    assert outcome["wrapped_optimizer"] == {"apart": 0, "spread": 0, "steps": [4, 4]}


def test_fabric_trains_several_modules(outcome):
    """Without compression exactly as DDP; with it, each module's residuals are in checkpoints."""
    found = outcome["several_modules"]
    assert found["apart"] == found["onebit"] == found["dgc"] == 0
    assert found["resumed"] == {"onebit": [0, 0], "dgc": [0, 0]}


def test_fabric_evaluates_a_second_model(outcome):
    assert outcome["evaluates"] == {"apart": 0, "warned": [], "gradients_apart": 0, "moved": True}


@pytest.mark.parametrize("method", ["none", "int8", "onebit"])
def test_a_model_in_training_can_be_copied(outcome, method):
    assert outcome["copies"][method] == [0, 0, 0, 0]


@pytest.mark.parametrize("method", ["none", "int8", "onebit"])
def test_what_ddp_ignores_may_be_replaced_and_frozen(outcome, method):
    assert outcome["ignored_parameters"][method] == [0, 0]
