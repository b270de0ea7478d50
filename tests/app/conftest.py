"""`gradcomp` in the process of the tests: it composes and checks runs, and starts no rank."""

import sys
from copy import deepcopy
from functools import cache
from pathlib import Path

import hydra
import pytest
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from lightning_gradcomp.app import compose, ranks, train


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs `gradcomp WORDS` in `tmp_path`. Returns the exit code, what it printed, and the config of each run that
    would have started."""
    monkeypatch.chdir(tmp_path)
    started = []

    def start(number, run, yaml):
        started.append(OmegaConf.create(yaml))
        return {"val_acc": 0.5, "val_loss": 2.0}

    monkeypatch.setattr(ranks, "start", start)
    monkeypatch.setattr(compose, "register", lambda: _register(compose.PACKAGE))
    monkeypatch.setattr(Hydra, "get_mode", lambda *_, **__: None)  # composes a second time, for an option we don't use
    for name in ("PL_GLOBAL_SEED", "HYDRA_FULL_ERROR"):  # which the command sets: restored afterwards
        monkeypatch.setenv(name, "0")

    def gradcomp(*words):
        started.clear()
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["gradcomp", *words])
        code = 0
        try:
            train.main()
        except SystemExit as ended:
            code = ended.code
        printed = capsys.readouterr()
        text = printed.out + printed.err + (code if isinstance(code, str) else "")
        return (1 if isinstance(code, str) else code or 0), text, list(started)

    return gradcomp


def composed(*words: str) -> DictConfig:
    """The config that Hydra composes."""
    return deepcopy(_composed(words))


@cache
def _composed(words: tuple[str, ...]) -> DictConfig:
    _register(compose.PACKAGE)
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(compose.shipped("conf")), version_base="1.3"):
        config = hydra.compose("train", overrides=["trainer.accelerator=cpu", *words])
    compose.apply_overrides(config, words)
    config.folder = "the-folder-of-the-run"
    return config


@cache
def _register(package: Path, register=compose.register) -> None:
    """Once for each package that has recipes: reading them takes as long as composing a run."""
    register()


def built(*words: str) -> compose.Run:
    """The objects of a composed run."""
    return compose.build(composed(*words))
