"""A run's folder belongs to one run; secrets are in none of its files; a Ctrl-C ends the report with a code."""

import fcntl
from pathlib import Path

import pytest
import yaml

from lightning_gradcomp.app import report, run_folder
from lightning_gradcomp.app.options import logger
from lightning_gradcomp.app.redaction import redacted
from tests.app.test_compose import run_of


def test_two_runs_of_one_second_have_two_folders(command):
    words = ("hydra.run.dir='runs/${now:%Y}'", "compressor=none")
    (_, first), (_, second) = command(*words, "seed=1"), command(*words, "seed=2")
    [(one, run_one)], [(two, run_two)] = first, second
    assert two.name == f"{one.name}-2" and (run_one.seed, run_two.seed) == (1, 2)
    assert yaml.safe_load((one / "config.yaml").read_text())["seed"] == 1
    assert yaml.safe_load((one / ".hydra" / "config.yaml").read_text())["seed"] == 1


def test_two_sweeps_of_one_second_have_two_folders(command):
    words = ("-m", "seed=1,2", "hydra.sweep.dir='runs/${now:%Y}'")
    (_, first), (_, second) = command(*words), command(*words)
    folders = [[str(folder.relative_to(Path.cwd())) for folder, _ in sweep] for sweep in (first, second)]
    name = folders[0][0].removesuffix("/0")
    assert folders == [[f"{name}/0", f"{name}/1"], [f"{name}-2/0", f"{name}-2/1"]]


def test_a_folder_in_use_is_refused(command, tmp_path):
    (tmp_path / "mine").mkdir()
    with (tmp_path / "mine" / run_folder.LOCK).open("w") as other:  # another run, which has not ended
        fcntl.flock(other, fcntl.LOCK_EX)
        code, trained = command("hydra.run.dir=mine")
        assert (
            code.startswith("gradcomp: hydra.run.dir: got 'mine', allowed: a folder that no other run") and not trained
        )
        assert [path.name for path in (tmp_path / "mine").iterdir()] == [run_folder.LOCK]
    for seed in (1, 2):  # it has ended, and the folder is used again
        assert [run.seed for _, run in command("hydra.run.dir=mine", f"seed={seed}")[1]] == [seed]


@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "metrics.csv"])
def test_a_folder_with_files_of_the_user_s_is_refused(command, tmp_path, name):
    (tmp_path / name).write_text("mine")
    code, trained = command("hydra.run.dir=.")
    assert code.startswith(f"gradcomp: hydra.run.dir: got '., with {name} that no run has written'") and not trained
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_jobs_of_a_sweep_have_folders_of_their_own(command, tmp_path):
    words = ("-m", "compressor=dgc", "seed=0,1", "hydra.sweep.dir=sweep")
    code, trained = command(*words, "hydra.sweep.subdir='${hydra:runtime.choices.compressor}'")
    assert code == (
        "gradcomp: hydra.sweep.subdir: got 'dgc', allowed: a folder for each job, such as ${hydra.job.num} "
        "(job 1 of the sweep: compressor=dgc seed=1)"
    )
    assert not trained and not list(tmp_path.iterdir())
    code, trained = command(*words, "hydra.sweep.subdir='seeds/${seed}'")
    assert code == 0 and [folder.relative_to(tmp_path) for folder, _ in trained] == [
        Path("sweep/seeds/0"),
        Path("sweep/seeds/1"),
    ]


def test_no_job_starts_where_a_later_one_is_wrong(command, tmp_path):
    code, trained = command("-m", "compressor=dgc", "compressor.sparsity=0.9,1.5")
    assert code == (
        "gradcomp: DGC.sparsity: got 1.5, allowed: 0 <= sparsity < 1 "
        "(job 1 of the sweep: compressor=dgc compressor.sparsity=1.5)"
    )
    assert not trained and not list(tmp_path.iterdir())
    code, trained = command("-m", "compressor=dgc", "compressor.sparsity=0.9,0.99")
    assert code == 0 and [run.compressor.sparsity for _, run in trained] == [0.9, 0.99]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["logger.tracking_uri='https://user:hunter2@host/?token=hunter2'"],
        ["logger.tracking_uri='https://user:hunter2@host/?token=hunter2'", "hydra.sweep.subdir='a/${hydra.job.num}'"],
    ],
)
def test_secrets_reach_the_logger_and_no_file(command, tmp_path, monkeypatch, words):
    monkeypatch.setattr(logger, "find_spec", lambda name: name)
    uri = "https://user:hunter2@host/?token=hunter2"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    code, [(folder, run)] = command("logger=mlflow", "-m", *words)
    assert code == 0 and run.logger.tracking_uri == uri
    assert "https://***@host/?token=***" in (folder / "config.yaml").read_text()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.yaml", "overrides.yaml", "hydra.yaml", "multirun.yaml"} <= {path.name for path in files}
    assert not [path for path in files if "hunter2" in path.read_text()]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("sqlite:///mlflow.db", "sqlite:///mlflow.db"),
        ("https://host/a@b", "https://host/a@b"),
        ("uri: https://user:p@ss@host:80/x", "uri: https://***@host:80/x"),
        ("logger.api_key=abc", "logger.api_key=***"),
        ("logger.token: got 'abc', allowed: mode", "logger.token: got ***, allowed: mode"),
        ("tokens", "tokens"),
        ("model.options.class_token=false", "model.options.class_token=false"),
        ("password=5", "password=***"),
    ],
)
def test_what_is_redacted(text, shown):
    assert redacted(text) == shown


def test_a_ctrl_c_while_figures_are_drawn(command, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "write", interrupted)
    code, [(folder, _)] = command()
    words = f"interrupted; the run is complete, and its report is written by: gradcomp report {folder}"
    assert code == 130 and capsys.readouterr().err.strip() == f"gradcomp: {words}"
    code, _ = command("report", str(folder))
    assert code == 130 and capsys.readouterr().err.strip() == "gradcomp: interrupted"


def test_a_report_that_fails_leaves_the_run_complete(command, monkeypatch, capsys):
    def failing(*_):
        raise OSError(28, "No space left on device", "report.md")

    monkeypatch.setattr(report, "write", failing)
    code, trained = command()
    assert code == 0 and len(trained) == 1
    assert "gradcomp: no report was written: [Errno 28] No space left on device: 'report.md'" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "content"), [("config.yaml", "model: ["), ("summary.json", "{"), ("config.yaml", "")])
def test_a_broken_earlier_run_is_named(command, tmp_path, name, content):
    (tmp_path / "old" / "checkpoints").mkdir(parents=True)
    (tmp_path / "old" / "checkpoints" / "last.ckpt").touch()
    run_folder.save(run_of(), tmp_path / "old")
    (tmp_path / "old" / name).write_text(content)
    code, trained = command("ckpt=old")
    assert code.startswith(f"gradcomp: ckpt: got '{tmp_path / 'old' / name}', allowed: the file of a run")
    assert not trained
