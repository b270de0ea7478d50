"""What the command answers without training: help, wrong options, all of it without Lightning."""

import shutil
import subprocess
import sys

import pytest

from lightning_gradcomp.app import cli
from tests.app.command import ROOT, gradcomp

# One for each way to be wrong; what else is answered, test_arguments.py and test_compose.py show in one process.
WRONG = [
    (["compressor=lzma"], "Could not find 'compressor/lzma'\n\nAvailable options in 'compressor':\n\t"),
    (["compressor.sparsity=1.5"], "gradcomp: DGC.sparsity: got 1.5, allowed: 0 <= sparsity < 1"),
    (["data.batch_size=63"], "gradcomp: data.batch_size: got 63, allowed: a multiple of 2 (ranks), 4 or more"),
    (["trainer.devices=3", "dry_run=true"], "gradcomp: data.batch_size: got 64, allowed: a multiple of 3 (ranks)"),
    (
        ["trainer.precision=16-mixed", "trainer.accelerator=cpu"],
        "gradcomp: trainer.precision on a CPU: got '16-mixed', all",
    ),
    (["compressor.sparsity=high"], "Value 'high' of type 'str' could not be converted to Float"),
    (["foo"], "gradcomp: argument: got 'foo', allowed: augment="),
    (["compressor=none,dgc"], "To sweep over it, add --multirun"),
    (
        ["-m", "compressor=dgc", "compressor.sparsity=0.9,1.5"],
        "gradcomp: DGC.sparsity: got 1.5, allowed: 0 <= sparsity",
    ),
    (["-m", "compressor=none,lzma"], "Could not find 'compressor/lzma'"),
    (["logger=mlflow", "+logger.token=hunter2"], "gradcomp: logger.token: got ***, allowed: experiment"),
]


@pytest.mark.parametrize(("arguments", "sentence"), WRONG)
def test_a_wrong_option_is_answered_with_a_sentence(command, tmp_path, capsys, arguments, sentence):
    code, trained = command(*arguments)
    answer = capsys.readouterr().err + str(code)
    assert code != 0 and sentence in answer and not trained
    assert "Traceback" not in answer and "hunter2" not in answer
    assert not list(tmp_path.iterdir())  # no run has begun, and no job of a sweep


RANK_1 = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("arguments", "environment", "code"),
    [(["trainer.devices=2", "compressor.sparsity=1.5"], RANK_1, 1), (["plan", "--help"], {}, 0)],
    ids=["another rank's refusal", "help"],
)
def test_lightning_is_not_imported_for_an_answer_and_nothing_is_left(arguments, environment, code, tmp_path):
    answer = gradcomp(tmp_path, *arguments, PYTHONPROFILEIMPORTTIME="1", **environment)
    lines = (line for line in answer.stderr.splitlines() if line.startswith("import time:"))
    modules = {line.rsplit("|", 1)[-1].strip() for line in lines}
    assert "lightning_gradcomp.compressors.dgc" in modules
    assert not modules & {"lightning", "lightning.pytorch", "lightning.fabric", "torchvision", "sklearn"}
    assert answer.returncode == code and list(tmp_path.iterdir()) == []


def test_help_is_short_and_shows_the_choices(command, capsys):
    assert command("--help") == (0, [])
    text = capsys.readouterr().out
    assert text.count("\n  gradcomp ") == 9
    for line in (
        "data: cifar10, digits, imagefolder, imagenet, synthetic",
        "strategy: ddp, dga, dist_async, hsdp",
        "model: custom, resnet18, resnet50, swin_mini, swin_t, timm, torchvision",
        "logger: csv, mlflow, none, tensorboard, wandb",
        "optimizer: adamw, sgd",
    ):
        assert line in text.splitlines()
    assert "momentum_masking: true" not in text and len(text.splitlines()) < 36


def test_tab_completion_knows_groups_and_options(command, monkeypatch, capsys):
    def complete(typed: str) -> list[str]:
        line = f"gradcomp {typed}"
        for name, value in {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_CWORD": "1"}.items():
            monkeypatch.setenv(name, value)
        command("-sc", "query=bash")
        return capsys.readouterr().out.split()

    assert "compressor=dgc" in complete("compressor=")
    assert "compressor.sparsity=" in complete("compressor.spars")


def test_a_missing_extra_is_named(monkeypatch):
    for module in ("hydra", "sklearn"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "argv", ["gradcomp"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert str(ended.value) == (
        "gradcomp: needs the extra 'recipes': pip install 'lightning-gradcomp[recipes]' "
        "(missing: hydra-core, scikit-learn)"
    )


def test_a_launcher_starts_no_sweep(command, tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    code, trained = command("-m", "compressor=none,dgc")
    assert "allowed: one run for each start" in code and not trained and not list(tmp_path.iterdir())


def test_it_works_as_a_wheel_lays_it_out(tmp_path):
    package = tmp_path / "site-packages" / "lightning_gradcomp"
    shutil.copytree(ROOT / "lightning_gradcomp", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "gradcomp_command.py", package.parent)
    for folder in ("conf", "recipes"):
        shutil.copytree(ROOT / folder, package / folder)
    recipe = package / "recipes" / "digits.yaml"
    (package / "recipes" / "other.yaml").write_text(recipe.read_text() + "seed: 17\n")  # only this copy has it
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    answer = gradcomp(elsewhere, "recipe=other", "--cfg", "job", package=package.parent)
    assert answer.returncode == 0 and "seed: 17" in answer.stdout and "momentum_masking: true" in answer.stdout


def test_a_printed_config_has_no_secrets(command, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://user:hunter2@host")
    command("logger=mlflow", "--cfg", "job", "--resolve", "-p", "logger")
    printed = capsys.readouterr().out
    assert "https://***@host" in printed and "hunter2" not in printed


def test_a_working_folder_that_cannot_be_written(command, tmp_path):
    (tmp_path / "runs").touch()
    code, trained = command()
    assert code.startswith("gradcomp: [Errno") and "'runs" in code and not trained


def test_the_users_own_recipes_are_found(command, tmp_path, capsys):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\nseed: 23\ntrainer: {max_epochs: 3}\n")
    command("-cd", ".", "recipe=mine", "--cfg", "job")
    printed = capsys.readouterr().out
    assert "seed: 23" in printed and "max_epochs: 3" in printed


def test_the_installed_script_is_the_same_command():
    script = shutil.which("gradcomp", path=str(ROOT.parent)) or shutil.which("gradcomp", path=sys.prefix + "/bin")
    if script is None:
        pytest.skip("the package is not installed")
    answer = subprocess.run([script, "foo"], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 1 and "got 'foo'" in answer.stderr
