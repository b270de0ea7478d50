"""Commands in the docs: those of `gradcomp` are composed to a run; of the others, the parts that are ours exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from copy import deepcopy
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from lightning_gradcomp.app import arguments, cli, plan, report, server_arguments, shorthands
from lightning_gradcomp.app.compose import checked, choices, register, shipped
from lightning_gradcomp.app.config import Run
from lightning_gradcomp.app.options import training
from tests.pages import INLINE, PAGES, ROOT, blocks, prose

ENVIRONMENT = re.compile(r"[A-Z_]+=.*")


def commands(text: str) -> list[list[str]]:
    """The words of every command of a block: lines may go on after a backslash, and hold several joined by &&."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        command: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word == "&&":
                found += [command] if command else []
                command = []
            else:
                command.append(word)
    return found


def in_blocks() -> list:
    return [
        pytest.param(command, id=f"{page}:{line}: {' '.join(command)}")
        for page in PAGES
        for kind, line, text in blocks(page)
        if kind == "bash"
        for command in commands(text)
    ]


def in_sentences() -> list:
    """`gradcomp ...` as a whole in a sentence; not where a word stands for another, such as MODEL or name."""
    found = {span: page for page in PAGES for span in INLINE.findall(prose(page)) if span.startswith("gradcomp ")}
    return [
        pytest.param(shlex.split(span), id=f"{page}: {span}")
        for span, page in found.items()
        if "..." not in span and not re.search(r" [A-Z]{2,}|=name$", span) and span != "gradcomp plan"
    ]


@cache
def composed(chosen: tuple[str, ...]) -> DictConfig:
    return compose("train", overrides=list(chosen))


def run_of(overrides: list[str]) -> Run:
    """The run that Hydra composes from the choices among these, with the options set: to compose each takes longer."""
    parsed = dict(zip(overrides, OverridesParser.create().parse_overrides(overrides), strict=True))
    chosen = [word for word, override in parsed.items() if override.key_or_group in choices()]
    config = deepcopy(composed(tuple(sorted(chosen))))
    for word, override in parsed.items():
        if word not in chosen:
            OmegaConf.update(config, override.key_or_group, override.value(), force_add=override.is_force_add())
    return checked(config)


def jobs(words: list[str]) -> list[list[str]]:
    """A sweep's overrides, a list for each job."""
    values = []
    for word in words:
        name, value = word.split("=", 1)
        values.append([word] if value.startswith("[") else [f"{name}={choice}" for choice in value.split(",")])
    return [list(job) for job in product(*values)]


def check_gradcomp(words: list[str]) -> None:
    if words[:1] == ["plan"]:
        assert plan.read(words[1:]).model
        return
    if words[:1] == ["report"]:
        assert report.parser().parse_args(words[1:]) is not None
        return
    if words[:1] == ["compressors"]:
        assert cli.show_compressors(words[1:]) == 0
        return
    if words and words[0] in cli.WORDS:
        assert words[1:] == []
        return
    process, _, words = server_arguments.split(words)
    flags, overrides = arguments.split(words)
    overrides = shorthands.expand(overrides)
    arguments.check(flags, overrides)
    sweep = {"-m", "--multirun"} & set(flags)
    for job in jobs(overrides) if sweep else [overrides]:
        assert isinstance(run := run_of(job), Run)
        assert process == "train" or server_arguments.check(run) is None


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    extras = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    for extra in re.findall(r"\[(\w+)\]", " ".join(words)):
        assert re.search(rf"^{extra} = ", extras, re.MULTILINE), extra


def check_lighthouse(words: list[str]) -> None:
    command = [str(Path(sys.executable).parent / "torchft_lighthouse"), "--help"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert all(word in told for word in words if word.startswith("--"))


def check_python(words: list[str]) -> None:
    words, _, inner = " ".join(words).partition(" -- ")
    options = words.split()
    if options[:2] == ["-m", "lightning_gradcomp"]:
        check_gradcomp(options[2:])
        return
    if options[0] == "-m" and options[1] in ("venv", "pip", "pytest", "zensical"):
        return
    name = options[1].replace(".", "/") + ".py" if options[0] == "-m" else options[0]
    source = (ROOT / name).read_text()
    for option in options:
        if option.startswith("--"):
            assert f'"{option}"' in source, f"{name} has no {option}"
    if inner:
        check(inner.split())


def check_torchrun(words: list[str]) -> None:
    if "-m" in words:
        module, *rest = words[words.index("-m") + 1 :]
        assert module == "lightning_gradcomp"
        check_gradcomp(rest)
    else:
        assert any((ROOT / word).is_file() for word in words if word.endswith(".py"))


def check_file(words: list[str]) -> None:
    assert (ROOT / words[-1]).is_file()


def check_nothing(words: list[str]) -> None:
    """A tool with a command line of its own, started as everybody does."""


CHECKS = {
    "gradcomp": check_gradcomp,
    "pip": check_pip,
    "python": check_python,
    "python3": check_python,
    "torchft_lighthouse": check_lighthouse,
    "torchrun": check_torchrun,
    "sbatch": check_file,
    **dict.fromkeys((".", "cd", "git", "pytest", "ruff", "pyrefly"), check_nothing),
}


def check(command: list[str]) -> None:
    command = command[next(i for i, word in enumerate(command) if not ENVIRONMENT.fullmatch(word)) :]
    assert command[0] in CHECKS, f"nobody knows how to test {command[0]!r}"
    CHECKS[command[0]](command[1:])


@pytest.fixture(scope="module", autouse=True)
def hydra():
    register()
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        yield


@pytest.fixture(autouse=True)
def somewhere_with_packages(monkeypatch, tmp_path):
    """The `package.module:Class` of docs/planning.md, and timm."""
    monkeypatch.setattr(training, "find_spec", lambda name: name)
    monkeypatch.setenv(server_arguments.SECRET, "word")
    (tmp_path / "package.py").touch()
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [""])  # `plan` puts another in front


@pytest.mark.parametrize("command", [*in_blocks(), *in_sentences()])
def test_a_command_of_the_docs_is_one(command):
    check(command)


@pytest.mark.parametrize("line", ["gradcomp compresor=dgc", "pip install -e '.[everything]'", "make", "python no.py"])
def test_a_wrong_one_would_be_found(line):
    with pytest.raises((ValueError, AssertionError, OSError)):
        check(shlex.split(line))
