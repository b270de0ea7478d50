"""The real command, from the command line to the run's folder. Tiny runs; each is a tree of processes."""

import csv
import json
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml
from packaging.version import Version
from torch.nn.functional import cross_entropy

from lightning_gradcomp.app.data.digits import digits
from lightning_gradcomp.app.models.swin import swin_mini
from tests.app.command import gradcomp

# Two steps of a small network, and the whole validation after each.
TINY = (
    "model=swin_mini",
    "trainer=smoke",
    "trainer.limit_train_batches=1",
    "trainer.limit_val_batches=null",
    "trainer.accelerator=cpu",
    "seed=7",
)
FIGURES = ("accuracy_over_bytes", "accuracy_over_time", "step_time", "ratio_and_density", "residual")
NOISE = (
    "litlogger",
    "LeafSpec",
    "GPU available",
    "many workers",
    "Experiment logs directory",
    "sync_dist",
    "Traceback",
)


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """Name -> (folder, what the command came to). Side by side, since the processes of each start one by one."""
    lines = {
        "sweep": (*TINY, "-m", "trainer.devices=1,2", "hydra.sweep.dir=sweep"),
        "run": (*TINY, "trainer.devices=2"),
        "failed": ("trainer=smoke", "trainer.devices=2", "data.batch_size=1438", "hydra.run.dir=failed"),
    }
    folders = {name: tmp_path_factory.mktemp(name) for name in lines}
    with ThreadPoolExecutor(2) as pool:
        started = {name: pool.submit(gradcomp, folders[name], *line, timeout=240) for name, line in lines.items()}
        return {name: (folders[name], command.result()) for name, command in started.items()}


@pytest.fixture(scope="module")
def run(commands):
    """One run with two processes: what it printed, its folder, its summary."""
    folder, done = commands["run"]
    assert done.returncode == 0, done.stderr
    (output,) = (folder / "runs").iterdir()
    return done, output, json.loads((output / "summary.json").read_text())


def test_the_folder_of_a_run(run):
    _, folder, _ = run
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    older = {"hparams.yaml"} if Version(version("lightning")) < Version("2.6") else set()  # empty, by its CSVLogger
    assert files == older | {
        "metrics.csv",
        "summary.json",
        "config.yaml",
        "report.md",
        *(f"figures/{name}.{form}" for name in FIGURES for form in ("png", "svg")),
        "checkpoints/best.ckpt",
        "checkpoints/last.ckpt",
        ".lock",
        ".hydra/config.yaml",
        ".hydra/hydra.yaml",
        ".hydra/overrides.yaml",
    }
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["compressor"]["name"] == "dgc" and config["compressor"]["values"] == "int2"
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(bool(row["train_loss"]) for row in rows) == 2 and sum(bool(row["val_acc"]) for row in rows) == 2


def test_the_summary_holds_result_costs_and_conditions(run):
    _, folder, summary = run
    communication = summary["communication"]
    assert (communication["world_size"], communication["steps"]) == (2, 2)
    assert 0 < communication["bytes_sent"] < communication["dense_bytes"]
    assert communication["ratio"] == pytest.approx(communication["dense_bytes"] / communication["bytes_sent"])
    assert set(communication["milliseconds"]) == {"compute", "compress", "exchange", "decompress"}
    assert summary["val_images"] == 360 and summary["val_acc"] == summary["val_correct"] / 360
    assert summary["config"] == yaml.safe_load((folder / "config.yaml").read_text())
    assert (summary["epochs"], summary["device"], summary["devices_per_node"]) == (2, "CPU", 2)
    assert summary["gpus_per_node"] == 0
    assert summary["packages"]["torch"] == torch.__version__.split("+")[0] and summary["wall_seconds"] > 0


def test_the_accuracy_is_that_of_the_saved_model(run):
    _, folder, summary = run
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=False)["state_dict"]
    model = swin_mini(channels=1, classes=10, size=8)
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state.items()})
    images, labels = digits()[1].tensors
    with torch.no_grad():
        logits = model.eval()(images)
    assert (logits.argmax(1) == labels).sum() == summary["val_correct"]
    with (folder / "metrics.csv").open() as file:
        logged = [float(row["val_loss"]) for row in csv.DictReader(file) if row["val_loss"]]
    assert logged[-1] == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-4)


def test_the_output(run):
    done, folder, summary = run
    assert f"validation accuracy  {summary['val_acc']:.2%} ({summary['val_correct']} of 360 images)" in done.stdout
    assert "by each of 2 processes (all_gather); uncompressed 28x as much" in done.stdout  # in its first 16 steps
    assert f", {summary['communication']['ratio']:.1f}x as much" in done.stdout
    assert str(folder) in done.stdout and "Epoch 0" in done.stdout  # the progress bar
    for line in NOISE:
        assert line not in done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line and not line.startswith("---")]
    assert len(lines) == len(set(lines))


@pytest.fixture(scope="module")
def sweep(commands):
    """The folders of a sweep over the number of processes."""
    folder, done = commands["sweep"]
    assert done.returncode == 0, done.stderr
    return [folder / "sweep" / str(job) for job in range(2)]


def test_a_sweep_is_a_series_of_fresh_runs(sweep, run):
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in sweep]
    assert [summary["communication"]["world_size"] for summary in summaries] == [1, 2]
    assert [summary["communication"]["ratio"] > 1 for summary in summaries] == [False, True]
    # The last job's threads are not what an earlier one left.
    assert summaries[1]["threads_per_process"] == run[2]["threads_per_process"]


def test_a_sweep_repeats_a_run_of_the_same_seed(run, sweep):
    def numbers(folder: Path) -> list[dict[str, str]]:
        with (folder / "metrics.csv").open() as file:
            return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in csv.DictReader(file)]

    assert numbers(sweep[1]) == numbers(run[1])


def test_a_training_that_fails_is_a_sentence_and_an_exit_code(commands):
    folder, done = commands["failed"]
    assert done.returncode == 1
    assert "gradcomp: data.batch_size: got 1438, allowed: a multiple of 2 (ranks), 4 to 1437" in done.stderr
    assert f"training failed with exit code 1; its folder is {folder / 'failed'}" in done.stderr
    assert "Traceback" not in done.stderr and not (folder / "failed" / "summary.json").exists()


def test_the_report_finds_everything_in_the_run_s_files(run):
    _, folder, summary = run
    page = (folder / "report.md").read_text()
    assert "not logged" not in page and "What is missing" not in page
    assert f"{summary['communication']['ratio']:.3g} (N=2)" in page and f"{100 * summary['val_acc']:.2f} %" in page
