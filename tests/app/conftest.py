"""`gradcomp` in the process of the tests, where a training process is not needed."""

import json
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

import gradcomp_command
from lightning_gradcomp.app import processes, report, run_folder


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs `gradcomp WORDS` in this process and in `tmp_path`, with a training that only writes its files.

    Returns the exit code, and what each training process would have read: (folder, run with secrets).
    """
    trained = []

    def train(process, folder, *address, environment):
        with monkeypatch.context() as patched:
            for name, value in environment.items():
                patched.setenv(name, value)
            trained.append((Path(folder), run_folder.load(Path(folder))))
        (Path(folder) / "metrics.csv").touch()
        (Path(folder) / "summary.json").write_text(json.dumps({"val_acc": 0.5}))
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "run", train)
    monkeypatch.setattr(report, "write", lambda folders: folders[0] / "report.md")

    def gradcomp(*words):
        trained.clear()
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["gradcomp", *words])
        try:
            gradcomp_command.main()
        except SystemExit as ended:
            return ended.code, list(trained)
        return 0, list(trained)

    return gradcomp
