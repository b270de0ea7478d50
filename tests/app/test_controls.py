"""Everyday controls, with real ranks: Ctrl-C and resuming, evaluate, a dry run; env and recipes."""

import json
import sys
from pathlib import Path

import pytest
import torch

from lightning_gradcomp.app import cli, report, run_folder
from tests.app.test_compose import run_of
from tests.processes import start_world

SCRIPT = str(Path(__file__).with_name("train_script.py"))
RUN = (
    "recipe=digits_swin",  # drops paths at random, so that it shows where the random numbers stand
    "compressor=onebit",
    "compressor.warmup_epochs=0",
    "trainer.max_epochs=2",
    "trainer.limit_train_batches=12",
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
    "seed=3",
)
DRY = ("recipe=resnet18_cifar10", "compressor=dgc", "optimizer=sgd", "trainer.accelerator=cpu", "dry_run=true")
STOPPED_AT = 15  # in the midst of the second epoch


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder, and the ended ranks of each run: "whole"; "part", ended by a Ctrl-C; "rest", which resumes it; and
    "eval", which evaluates that one; "dry"."""
    folder = tmp_path_factory.mktemp("controls")

    def start(name, *overrides, step=()):
        (folder / name).mkdir()
        run = run_of(*overrides)
        run_folder.resolve_checkpoint(run, folder / name, sweep=False)
        run_folder.save(run, folder / name)
        return start_world(2, SCRIPT, str(folder / name), *step)

    whole = start("whole", *RUN)
    part = start("part", *RUN, step=(str(STOPPED_AT),))
    done = {"whole": [rank.end() for rank in whole], "part": [rank.end() for rank in part]}
    rest, dry = start("rest", *RUN, f"ckpt={folder / 'part'}"), start("dry", *DRY)
    done |= {"rest": [rank.end() for rank in rest], "dry": [rank.end() for rank in dry]}
    done["eval"] = [rank.end() for rank in start("eval", *RUN, "evaluate=true", f"ckpt={folder / 'rest'}")]
    return folder, done


def said(runs, name):
    """The output of all ranks of a run; fails where one has failed."""
    assert [rank.returncode for rank in runs[1][name]] == [0, 0], [rank.stdout for rank in runs[1][name]]
    return "".join(rank.stdout for rank in runs[1][name])


def test_a_ctrl_c_ends_all_ranks_after_the_same_step(runs):
    folder, done = runs
    assert [rank.returncode for rank in done["part"]] == [143, 143], [rank.stdout for rank in done["part"]]
    assert f"stopped after step {STOPPED_AT + 1}; to resume:" in done["part"][0].stdout
    assert "Traceback" not in done["part"][0].stdout + done["part"][1].stdout
    checkpoint = torch.load(folder / "part" / "checkpoints" / "last.ckpt")
    assert checkpoint["global_step"] == STOPPED_AT + 1
    assert len(checkpoint["lightning_gradcomp"]["ranks"]) == 2  # what both had not sent yet
    assert not (folder / "part" / "summary.json").exists()


def test_a_resumed_run_equals_an_uninterrupted_one(runs):
    folder, _ = runs
    assert "resuming from a checkpoint that ended" not in said(runs, "rest") + said(runs, "whole")
    ends = [torch.load(folder / name / "checkpoints" / "last.ckpt") for name in ("whole", "rest")]
    assert [end["global_step"] for end in ends] == [24, 24]
    weights, others = (end["state_dict"] for end in ends)
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())
    costs = [json.loads((folder / name / "summary.json").read_text())["communication"] for name in ("whole", "rest")]
    assert costs[0]["totals"]["bytes_sent"] == costs[1]["totals"]["bytes_sent"] > costs[1]["bytes_sent"]


def test_a_report_on_a_resumed_run_shows_both_parts(runs):
    folder, _ = runs
    page = report.write([folder / "rest"]).read_text()
    assert f"`{folder / 'rest'}`, resumed from `{folder / 'part'}`" in page


def test_evaluate_does_not_train(runs):
    folder, _ = runs
    assert "validation accuracy" in said(runs, "eval")
    result = json.loads((folder / "eval" / "evaluation.json").read_text())
    summary = json.loads((folder / "rest" / "summary.json").read_text())
    assert result["val_acc"] == pytest.approx(summary["best_val_acc"]) and result["val_images"] == 360
    assert {path.name for path in (folder / "eval").iterdir()} == {"config.yaml", "evaluation.json"}


def test_a_dry_run_writes_its_result_alone(runs):
    folder, _ = runs
    assert "resnet18 on random images (dry run), compressor dgc" in said(runs, "dry")
    summary = json.loads((folder / "dry" / "summary.json").read_text())
    assert summary["epochs"] == 2 and summary["communication"]["steps"] == 4
    assert {path.name for path in (folder / "dry").iterdir()} == {"config.yaml", "summary.json"}


def test_env_prints_versions_and_hardware(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gradcomp", "env"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr().out
    assert ended.value.code == 0 and f"torch               {torch.__version__.split('+')[0]}" in told
    assert "gloo" in told and not list(tmp_path.iterdir())


@pytest.mark.parametrize("word", ["env", "recipes"])
def test_further_words_are_refused(word, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gradcomp", word, "all"])
    with pytest.raises(SystemExit, match=f"^gradcomp: gradcomp {word}: got 'all', allowed: no further words"):
        cli.main()


def test_recipes_is_a_word(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gradcomp", "recipes"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0 and "resnet50_imagenet  resnet50" in capsys.readouterr().out
