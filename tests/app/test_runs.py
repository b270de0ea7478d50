"""The command with ranks in processes, from the words to the run's folder."""

import csv
import json
import os
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy

from lightning_gradcomp.app.data.digits import digits
from lightning_gradcomp.app.models import swin_mini
from tests.app.command import gradcomp
from tests.processes import Forked, start_world

RUN = (
    "recipe=digits_swin",  # drops paths at random, so that a resumed run shows whether it draws the same numbers
    "compressor=onebit",
    "compressor.warmup_epochs=0",
    "trainer.max_epochs=2",
    "trainer.limit_train_batches=6",
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
)
TINY = ("recipe=digits_swin", "trainer=smoke", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false")
STOPPED_AT = 8  # in the midst of the second epoch
SECRET = "918273645"
FORKED = str(Path(__file__).with_name("forked_command.py"))


def send(name, to, step=STOPPED_AT):
    return f"+callbacks.send={{_target_: tests.app.signals.Send, step: {step}, name: {name}, to: {to}}}"


COMMANDS = {
    "whole": RUN,
    "part": (*RUN, send("SIGINT", "group")),
    "rest": (*RUN, "ckpt=last"),
    "eval": (*RUN, "evaluate=true", "ckpt=best"),
    "sweep": ("-m", *TINY, "compressor=dgc_int8", "dry_run=true", "strategy=dga,dist_async,ddp"),
    "term": (*RUN, "logger=none", send("SIGTERM", "parent", step=2)),
    "killed": (*RUN, "logger=none", send("SIGKILL", "rank", step=2)),
    "torchrun": (
        *TINY, "strategy=dist_async", "optimizer=sgd", "data.seed='${oc.decode:${oc.env:SECRET}}'",
    ),
    "hsdp": (*TINY, "logger=none", "strategy=hsdp_2", "trainer.devices=4"),
    "mesh": (
        *TINY, "strategy=hsdp", "trainer.devices=2", "evaluate=true", "ckpt=last", "trainer.limit_val_batches=null",
    ),
}  # fmt: skip
AFTER = {"rest": "part", "eval": "rest", "mesh": "hsdp"}
"""Commands that continue what another one has left in its folder."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs a command of this name, once. Returns the folder in which it was called, and what came of it.

    `whole` is the command as users start it: its ranks import everything themselves.
    """

    @cache
    def ran(name):
        where = ran(AFTER[name])[0] if name in AFTER else tmp_path_factory.mktemp(name)
        if name == "whole":
            return where, gradcomp(where, *RUN)
        if name == "torchrun":  # which starts the ranks with these variables
            with mock.patch.dict(os.environ, SECRET=SECRET):
                first, second = start_world(2, FORKED, str(where), *COMMANDS[name])
            return where, (first.end(), second.end())[0]
        return where, Forked(FORKED, str(where), *COMMANDS[name]).end()

    return ran


def folders(runs, name):
    """The folders of the runs that were started where `name` was, oldest first; its command has succeeded."""
    where, done = runs(name)
    assert done.returncode == 0, done.stdout
    return sorted((where / "runs").iterdir())


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def test_the_folder_of_a_run(runs):
    [folder] = folders(runs, "whole")
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files >= {
        "metrics.csv",
        "summary.json",
        "config.yaml",
        "report.md",
        "checkpoints/best.ckpt",
        "checkpoints/last.ckpt",
        ".hydra/overrides.yaml",
    }
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(bool(row["train_loss"]) for row in rows) == 12 and sum(bool(row["val_acc"]) for row in rows) == 2


def test_the_summary_holds_result_costs_and_conditions(runs):
    [folder] = folders(runs, "whole")
    summary = summary_of(folder)
    communication = summary["communication"]
    assert (communication["world_size"], communication["steps"]) == (2, 12)
    assert communication["ratio"] == pytest.approx(communication["dense_bytes"] / communication["bytes_sent"]) != 1
    assert set(communication["milliseconds"]) == {"compute", "compress", "exchange", "decompress"}
    assert summary["val_images"] == 360 and summary["val_acc"] == summary["val_correct"] / 360
    assert summary["config"] == yaml.safe_load((folder / "config.yaml").read_text())
    assert (summary["epochs"], summary["device"], summary["devices_per_node"]) == (2, "CPU", 2)
    assert summary["packages"]["torch"] == torch.__version__.split("+")[0] and summary["wall_seconds"] > 0


def test_the_accuracy_is_that_of_the_saved_model(runs):
    [folder] = folders(runs, "whole")
    state = torch.load(folder / "checkpoints" / "last.ckpt")["state_dict"]
    model = swin_mini(channels=1, classes=10, size=8)
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items()})
    images, labels = digits()[1].tensors
    with torch.no_grad():
        logits = model.eval()(images)
    assert (logits.argmax(1) == labels).sum() == summary_of(folder)["val_correct"]
    with (folder / "metrics.csv").open() as file:
        logged = [float(row["val_loss"]) for row in csv.DictReader(file) if row["val_loss"]]
    assert logged[-1] == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-4)


def test_the_output_is_short(runs):
    [folder] = folders(runs, "whole")
    _, done = runs("whole")
    summary = summary_of(folder)
    assert f"validation accuracy  {summary['val_acc']:.2%} ({summary['val_correct']} of 360 images)" in done.stdout
    assert "by each of 2 processes (all_gather); uncompressed" in done.stdout
    assert str(folder) in done.stdout and "Epoch 0" in done.stdout  # the progress bar
    [line] = done.stderr.splitlines()  # the strategy's
    assert line.startswith("OneBit: ")


def test_no_secret_of_the_environment_is_in_a_file(runs):
    [folder] = folders(runs, "torchrun")
    assert "oc.env:SECRET" in (folder / "config.yaml").read_text()
    assert not [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_a_ctrl_c_ends_all_ranks_after_the_same_step(runs):
    where, done = runs("part")
    assert done.returncode == 130
    assert f"stopped after step {STOPPED_AT + 1}; to resume: the same command with ckpt={where}" in done.stdout
    assert "Traceback" not in done.stdout
    part, _, _ = folders(runs, "eval")
    checkpoint = torch.load(part / "checkpoints" / "last.ckpt")
    assert checkpoint["global_step"] == STOPPED_AT + 1
    assert len(checkpoint["lightning_gradcomp"]["ranks"]) == 2  # the residuals of both
    assert not (part / "summary.json").exists()


def test_a_resumed_run_equals_an_uninterrupted_one(runs):
    [whole] = folders(runs, "whole")
    part, rest, _ = folders(runs, "eval")
    assert yaml.safe_load((rest / "config.yaml").read_text())["ckpt"] == str(part / "checkpoints" / "last.ckpt")
    weights, others = (torch.load(run / "checkpoints" / "last.ckpt")["state_dict"] for run in (whole, rest))
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())
    costs = [summary_of(run)["communication"] for run in (whole, rest)]
    assert costs[0]["totals"]["bytes_sent"] == costs[1]["totals"]["bytes_sent"] > costs[1]["bytes_sent"]


def test_evaluate_does_not_train(runs):
    _, rest, evaluated = folders(runs, "eval")
    result = json.loads((evaluated / "evaluation.json").read_text())
    assert result["val_acc"] == pytest.approx(summary_of(rest)["best_val_acc"]) and result["val_images"] == 360
    assert {path.name for path in evaluated.iterdir()} == {"config.yaml", "evaluation.json", ".hydra"}
    assert "validation accuracy" in runs("eval")[1].stdout


def test_a_sweep_over_strategies_goes_on_after_a_job_that_fails(runs):
    where, done = runs("sweep")
    assert done.returncode == 1 and "Traceback" not in done.stdout
    assert "gradcomp: DGC with dist_async: got 'AdamW', allowed: SGD" in done.stdout  # said by the ranks
    [sweep] = (where / "runs").iterdir()
    jobs = [sweep / str(job) for job in range(3)]
    assert [(job / "summary.json").exists() for job in jobs] == [True, False, True]
    for job in (jobs[0], jobs[2]):
        assert summary_of(job)["communication"]["steps"] == 4
        assert {path.name for path in job.iterdir()} == {"config.yaml", "summary.json", ".hydra"}
    assert done.stdout.count("random data (dry run)") == 2


def test_a_sigterm_to_the_command_reaches_all_ranks(runs):
    where, done = runs("term")
    assert done.returncode == 143 and "; to resume: the same command with ckpt=" in done.stdout
    [folder] = (where / "runs").iterdir()
    assert torch.load(folder / "checkpoints" / "last.ckpt")["global_step"] in (3, 4)


def test_the_end_of_one_rank_ends_all(runs):
    where, done = runs("killed")
    assert done.returncode == 1 and "gradcomp: rank 1 ended with Signal 9 (SIGKILL)" in done.stdout
    assert f"; the run's folder is {where}" in done.stdout


def test_torchrun_starts_the_ranks(runs):
    [folder] = folders(runs, "torchrun")
    summary = summary_of(folder)
    assert summary["communication"]["world_size"] == summary["devices_per_node"] == 2
    assert (folder / "checkpoints" / "last.ckpt").exists()


def test_replicas_exchange_compressed_shards_and_another_mesh_reads_them(runs):
    first, again = folders(runs, "mesh")
    costs = summary_of(first)["communication"]
    assert (costs["world_size"], costs["shards"], costs["steps"]) == (2, 2, 4)
    assert 0 < costs["bytes_sent"] < costs["dense_bytes"] / 4
    assert "by each of 4 processes, between 2 replicas (all_gather)" in runs("hsdp")[1].stdout
    assert (first / "checkpoints" / "last.ckpt" / ".metadata").exists()  # a folder, by torch.distributed.checkpoint
    assert json.loads((again / "evaluation.json").read_text())["val_images"] == 360
