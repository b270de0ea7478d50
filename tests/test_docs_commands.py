"""Commands in the docs: those of `gradcomp` compose, and their classes take the options; of others, our parts exist."""

from __future__ import annotations

import re
import shlex
from functools import cache

import hydra
import pytest
from hydra.errors import HydraException
from hydra.utils import instantiate

from lightning_gradcomp.app import compose as app
from lightning_gradcomp.app import plan
from tests.pages import INLINE, PAGES, ROOT, blocks, prose

FLAGS = {"-m", "--multirun", "--help", "--cfg", "job", "-p", "compressor", "--resolve"}
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


def jobs(words: list[str]) -> list[list[str]]:
    """As many jobs of a sweep as have every choice once. Whole numbers are alike: of these, the first."""
    values = []
    for word in words:
        name, value = word.split("=", 1)
        choices = [value] if value.startswith("[") else value.split(",")
        choices = choices[:1] if all(choice.isdigit() for choice in choices) else choices
        values.append([f"{name}={choice}" for choice in choices])
    return [[each[number % len(each)] for each in values] for number in range(max(map(len, values)))]


def check_gradcomp(words: list[str]) -> None:
    if words[:1] == ["plan"]:
        assert plan.read(words[1:]).model
        return
    if words[:1] == ["report"]:
        assert words[1:]
        return
    if words[:1] == ["recipes"]:
        assert words[1:] == []
        return
    overrides = [word for word in words if "=" in word]
    assert {*words} - {*overrides} <= FLAGS
    for job in jobs(overrides) if {"-m", "--multirun"} & {*words} else [overrides]:
        check_job(tuple(job))


@cache
def check_job(job: tuple[str, ...]) -> None:
    config = hydra.compose("train", [*job])
    app.apply_overrides(config, job)
    for group in ("data", "optimizer", "scheduler", "strategy"):
        assert instantiate(config[group], _convert_="all")


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    extras = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    for extra in re.findall(r"\[(\w+)\]", " ".join(words)):
        assert re.search(rf"^{extra} = ", extras, re.MULTILINE), extra


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
    "torchrun": check_torchrun,
    "sbatch": check_file,
    **dict.fromkeys((".", "cd", "export", "git", "pytest", "ruff", "pyrefly"), check_nothing),
}


def check(command: list[str]) -> None:
    command = command[next(i for i, word in enumerate(command) if not ENVIRONMENT.fullmatch(word)) :]
    assert command[0] in CHECKS, f"nobody knows how to test {command[0]!r}"
    CHECKS[command[0]](command[1:])


@pytest.fixture(scope="module", autouse=True)
def conf():
    app.register()
    with hydra.initialize_config_dir(str(app.shipped("conf")), version_base="1.3"):
        yield


@pytest.fixture(autouse=True)
def somewhere_with_packages(monkeypatch, tmp_path):
    """The `package.module:Class` of the pages."""
    (tmp_path / "package.py").touch()
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [""])  # `plan` puts another in front


@pytest.mark.parametrize("command", [*in_blocks(), *in_sentences()])
def test_a_command_of_the_docs_is_one(command):
    check(command)


@pytest.mark.parametrize("line", ["gradcomp compresor=dgc", "pip install -e '.[everything]'", "make", "python no.py"])
def test_a_wrong_one_would_be_found(line):
    with pytest.raises((ValueError, AssertionError, OSError, HydraException)):
        check(shlex.split(line))
