"""Which checkpoint a word means, and which fit. The folders are made here; test_controls.py has the runs."""

import json
import os

import pytest

from lightning_gradcomp.app import run_folder
from tests.app.test_compose import run_of


def earlier(root, name, *overrides, age=0, epochs=None):
    """The folder of a run that has saved both checkpoints."""
    folder = root / name
    (folder / "checkpoints").mkdir(parents=True)
    run_folder.save(run_of(*overrides), folder)
    for checkpoint in ("last.ckpt", "best.ckpt"):
        path = folder / "checkpoints" / checkpoint
        path.touch()
        os.utime(path, (1e9 - age, 1e9 - age))
    if epochs:
        (folder / "summary.json").write_text(json.dumps({"epochs": epochs}))
    return folder


def resolved(root, *overrides, sweep=False):
    run = run_of(*overrides)
    run_folder.resolve_checkpoint(run, root / "now", sweep=sweep)
    return run.ckpt


def test_last_is_the_newest_run_s(tmp_path):
    earlier(tmp_path, "a", age=20)
    newest = earlier(tmp_path, "sweep/0", age=10)
    assert resolved(tmp_path, "ckpt=last") == str(newest / "checkpoints" / "last.ckpt")
    assert resolved(tmp_path, "ckpt=best", "evaluate=true") == str(newest / "checkpoints" / "best.ckpt")
    assert resolved(tmp_path) is None


def test_a_folder_or_a_file_is_taken_by_its_name(tmp_path):
    folder = earlier(tmp_path, "a")
    earlier(tmp_path, "b")
    last, best = (str(folder / "checkpoints" / f"{name}.ckpt") for name in ("last", "best"))
    assert resolved(tmp_path, f"ckpt={folder}") == last
    assert resolved(tmp_path, f"ckpt={folder}", "evaluate=true") == best
    assert resolved(tmp_path, f"ckpt={last}", "evaluate=true") == last
    alone = tmp_path / "alone.ckpt"
    alone.touch()
    assert resolved(tmp_path, f"ckpt={alone}", "model=resnet50") == str(alone)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["ckpt=best"], "ckpt: got 'best', allowed: last, to resume from"),
        (["ckpt=a/checkpoints/best.ckpt"], "ckpt: got 'a/checkpoints/best.ckpt', allowed: last.ckpt, to resume from"),
        (["ckpt=nowhere"], "ckpt: got 'nowhere', allowed: last, best, the folder of a run"),
        (["ckpt=last", "model=resnet50"], "model: got 'resnet50', allowed: resnet18, as in ckpt's run"),
        (["ckpt=last", "model=resnet50", "evaluate=true"], "model: got 'resnet50', allowed: resnet18"),
        (["ckpt=last", "data=synthetic"], "data: got 'synthetic', allowed: digits"),
        (["ckpt=last", "optimizer=adamw", "compressor=none"], "optimizer: got 'adamw', allowed: sgd"),
        (["ckpt=last", "trainer.max_epochs=10"], "trainer.max_epochs: got 10, allowed: more than the 10 that ckpt has"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, monkeypatch, overrides, sentence):
    monkeypatch.chdir(tmp_path)
    earlier(tmp_path, "a", epochs=10)
    with pytest.raises(ValueError) as refused:
        resolved(tmp_path, *overrides)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize("words", [["ckpt=last"], ["ckpt=best", "evaluate=true"]])
def test_another_fold_is_refused(tmp_path, words):
    earlier(tmp_path, "a", "data.fold=1")
    assert resolved(tmp_path, *words, "data.fold=1")
    with pytest.raises(ValueError, match=r"^data\.fold: got None, allowed: 1, as in ckpt's run"):
        resolved(tmp_path, *words)
    earlier(tmp_path, "b", age=-1)
    with pytest.raises(ValueError, match=r"^data\.fold: got 3, allowed: null, as in ckpt's run"):
        resolved(tmp_path, *words, "data.fold=3")


def test_more_epochs_and_another_compressor_fit(tmp_path):
    earlier(tmp_path, "a", epochs=10)
    assert resolved(tmp_path, "ckpt=last", "trainer.max_epochs=11", "compressor=powersgd")
    assert resolved(tmp_path, "ckpt=last", "optimizer=adamw", "compressor=none", "evaluate=true")


def test_a_distributed_checkpoint_is_a_folder_for_hsdp(tmp_path):
    path = earlier(tmp_path, "a") / "checkpoints" / "last.ckpt"
    path.unlink()
    path.mkdir()
    (path / ".metadata").touch()
    for given in ("last", path, tmp_path / "a"):
        assert resolved(tmp_path, f"ckpt={given}", "strategy=hsdp") == str(path)
    with pytest.raises(ValueError, match=r"^ckpt with strategy=ddp: got .*, a distributed checkpoint', allowed"):
        resolved(tmp_path, "ckpt=last")


def test_words_are_for_one_run_at_a_time(tmp_path, monkeypatch):
    earlier(tmp_path, "a")
    with pytest.raises(ValueError, match=r"^ckpt: got 'last', allowed: the path of a checkpoint, in sweeps"):
        resolved(tmp_path, "ckpt=last", sweep=True)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=r"where torchrun or SLURM starts ranks"):
        resolved(tmp_path, "ckpt=last")


def test_nothing_saved_yet(tmp_path):
    with pytest.raises(ValueError, match=r"^ckpt: got 'last', allowed: .*no run in .* has saved one yet"):
        resolved(tmp_path, "ckpt=last")


def test_a_run_s_own_folder_is_refused(tmp_path):
    earlier(tmp_path, "now")
    with pytest.raises(ValueError, match=r"^hydra.run.dir: got .*now', allowed: another folder"):
        resolved(tmp_path, "ckpt=last")
