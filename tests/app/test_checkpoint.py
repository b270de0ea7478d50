"""Which checkpoint a word means, and which ones a run can continue. test_runs.py has the runs themselves."""

import os

import pytest
from omegaconf import OmegaConf

from lightning_gradcomp.app.checkpoint import resolve
from tests.app.conftest import composed


def earlier(root, name, *words, age=0):
    """The folder of a run that has saved both checkpoints."""
    folder = root / name
    (folder / "checkpoints").mkdir(parents=True)
    OmegaConf.save(composed(*words), folder / "config.yaml")
    for checkpoint in ("last.ckpt", "best.ckpt"):
        path = folder / "checkpoints" / checkpoint
        path.touch()
        os.utime(path, (1e9 - age, 1e9 - age))
    return folder


def resolved(root, *words, is_alone=True):
    return resolve(composed(*words), root / "now", is_alone)


def test_last_is_the_newest_run_s(tmp_path):
    earlier(tmp_path, "a", age=20)
    newest = earlier(tmp_path, "sweep/0", age=10)
    assert resolved(tmp_path, "ckpt=last") == str(newest / "checkpoints" / "last.ckpt")
    assert resolved(tmp_path, "ckpt=best", "evaluate=true") == str(newest / "checkpoints" / "best.ckpt")
    assert resolved(tmp_path) is None
    with pytest.raises(ValueError, match=r"^ckpt: got 'last', allowed: the path of a checkpoint, in a sweep and under"):
        resolved(tmp_path, "ckpt=last", is_alone=False)


def test_a_folder_or_a_file_is_taken_by_its_name(tmp_path):
    folder = earlier(tmp_path, "a")
    last, best = (str(folder / "checkpoints" / f"{name}.ckpt") for name in ("last", "best"))
    assert resolved(tmp_path, f"ckpt={folder}", is_alone=False) == last
    assert resolved(tmp_path, f"ckpt={folder}", "evaluate=true") == best
    assert resolved(tmp_path, f"ckpt={last}", "evaluate=true") == last
    alone = tmp_path / "alone.ckpt"
    alone.touch()
    assert resolved(tmp_path, f"ckpt={alone}", "model=resnet50") == str(alone)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["ckpt=best"], "ckpt: got .*best.ckpt', allowed: last.ckpt, to resume from"),
        (["ckpt=nowhere"], "ckpt: got 'nowhere', allowed: last, best, the folder of a run"),
        (["ckpt=last", "model=resnet50"], "model: got '.*resnet50', allowed: .*resnet18, as in ckpt's run"),
        (["ckpt=best", "evaluate=true", "model=resnet50"], "model: got '.*resnet50', allowed: .*resnet18"),
        (["ckpt=last", "data=synthetic"], "data: got '.*Synthetic', allowed: .*Digits"),
        (["ckpt=last", "optimizer=adamw"], "optimizer: got 'torch.optim.AdamW', allowed: torch.optim.SGD"),
        (["ckpt=last", "data.fold=3"], "data.fold: got 3, allowed: null, as in ckpt's run"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, words, sentence):
    earlier(tmp_path, "a")
    with pytest.raises(ValueError, match=f"^{sentence}"):
        resolved(tmp_path, *words)


@pytest.mark.parametrize("text", ["- 1", "a: 1", "model: 3", "{a: [", "", "model: {_target_: x}"])
def test_a_config_of_another_program_is_not_a_run_s(tmp_path, text):
    path = earlier(tmp_path, "a") / "checkpoints" / "last.ckpt"
    (tmp_path / "a" / "config.yaml").write_text(text)
    assert resolved(tmp_path, f"ckpt={path}", "model=resnet50") == str(path)


def test_more_epochs_and_another_compressor_fit(tmp_path):
    earlier(tmp_path, "a", "data.fold=1")
    assert resolved(tmp_path, "ckpt=last", "trainer.max_epochs=11", "compressor=powersgd", "data.fold=1")
    assert resolved(tmp_path, "ckpt=last", "optimizer=adamw", "evaluate=true", "data.fold=1")


def test_a_distributed_checkpoint_is_a_folder_for_hsdp(tmp_path):
    path = earlier(tmp_path, "a") / "checkpoints" / "last.ckpt"
    path.unlink()
    path.mkdir()
    (path / ".metadata").touch()
    for given in ("last", path, tmp_path / "a"):
        assert resolved(tmp_path, f"ckpt={given}", "strategy=hsdp") == str(path)
    with pytest.raises(ValueError, match=r"^ckpt without strategy=hsdp: got .*, a distributed checkpoint', allowed"):
        resolved(tmp_path, "ckpt=last")
