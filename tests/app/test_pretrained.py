"""Fine-tuning: weights to start from, and parameters that do not train."""

import pytest
import torch

from tests.app.conftest import built

WORDS = ["recipe=stdlib_gpt", "dry_run=true"]
TRUNK = "task.frozen=[embedding.weight,positions.*,blocks.*]"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run, and its network."""
    folder = tmp_path_factory.mktemp("run")
    task = built(*WORDS, "seed=7").task
    (folder / "checkpoints").mkdir()
    torch.save({"state_dict": task.state_dict(), "epoch": 3}, folder / "checkpoints/best.ckpt")
    return folder, task.model


def test_training_starts_from_the_weights_of_a_run_or_a_state_dict(run, tmp_path):
    folder, network = run
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    for path in (folder, folder / "checkpoints/best.ckpt", tmp_path / "weights.pt"):
        found = built(*WORDS, f"task.weights={path}").task.model.state_dict()
        assert all(torch.equal(found[name], saved) for name, saved in network.state_dict().items())


def test_a_checkpoint_of_the_run_needs_no_weights_of_another(run):
    built(*WORDS, "task.weights=nowhere", f"ckpt={run[0]}")


def test_a_layer_for_other_classes_keeps_its_initial_values_and_is_named(tmp_path, caplog):
    words = ["recipe=digits", "data=synthetic", "data.size=32"]
    caplog.set_level("INFO")
    torch.save(built(*words, "data.classes=4", "seed=7").task.model.state_dict(), tmp_path / "weights.pt")
    initial, found = (
        built(*words, "data.classes=5", *more).task.model.state_dict()
        for more in ([], [f"task.weights={tmp_path / 'weights.pt'}"])
    )
    assert {name for name in found if torch.equal(found[name], initial[name])} >= {"fc.weight", "fc.bias"}
    assert not torch.equal(found["conv1.weight"], initial["conv1.weight"])
    assert "fc.weight, fc.bias have another shape" in caplog.text


def test_only_what_is_not_frozen_trains(run):
    task = built(*WORDS, f"task.weights={run[0]}", TRUNK).task
    training = {name for name, parameter in task.model.named_parameters() if parameter.requires_grad}
    assert training == {"norm.weight", "norm.bias", "head.weight"}
    stepped = [parameter for group in task.parameter_groups() for parameter in group["params"]]
    assert {id(each) for each in stepped} == {id(dict(task.model.named_parameters())[name]) for name in training}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("task.weights=nowhere", "task.weights: got .nowhere .*No such file"),
        ("task.weights={file}", "weights of the same network"),
        ("task.weights={text}", "a file with a state dict"),
        ("task.frozen=[block.*]", r"task.frozen: got 'block.\*', allowed: a pattern"),
        ("task.frozen=['*']", "that leave a parameter to train"),
    ],
)
def test_what_can_not_be_is_refused(word, message, tmp_path):
    torch.save({"other": torch.zeros(1)}, tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("weights")
    with pytest.raises(ValueError, match=message):
        built(*WORDS, word.format(file=tmp_path / "other.pt", text=tmp_path / "text.pt"))
