"""All measurements and tests on a GPU, in one command of less than ten minutes.

    python -m benchmarks.gpu --out DIR
    python -m benchmarks.gpu --out DIR --dry-run    # the same commands on a CPU, tiny, to test this script

Each part runs other commands of this project, one at a time, each with a time limit:

- tests: `tests/gpu`, in tests.csv
- encode: `benchmarks.encode` for gradients of ResNet-18 and ResNet-50, in encode.csv
- steps: `benchmarks.step_time` of ResNet-50 at 224 pixels, two ranks, over loopback and emulated links, and of GPT-2
  small on 1,024 tokens over loopback, in steps.csv
- memory: `benchmarks.memory` of ResNet-50, in memory.csv
- accuracy: `benchmarks.time_to_accuracy` of the digits recipe, as many seeds as the time allows, in accuracy.csv

parts.csv has a line for each command, with its error if it failed, was late or was skipped; the next command runs all
the same. A late command's CSV holds what it had measured. log.txt has everything that the commands printed.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import link

STEPS = {0: (5, 3), 1000: (3, 2), 10_000: (4, 3), 100: (3, 1)}
"""Mbit/s of a link (0: loopback) -> steps a turn, turns. A step of DDP takes eight seconds over 100 Mbit/s."""

METHODS = "compute,ddp,fp16_hook,int8,eden,powersgd_hook,dgc@all_gather,onebit@all_gather,powersgd@all_gather"
GRACE = 10
"""Seconds that a late command has to clean up."""

TEST = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
"""A line of `pytest -v`."""


@dataclass(frozen=True)
class Command:
    """A command of one part.

    Args:
        part: one of PARTS.
        what: tells a part's commands apart.
        seconds: its time limit.
        words: arguments of `python`.
        why_not: why it can't run.
    """

    part: str
    what: str
    seconds: float
    words: Sequence[str]
    why_not: str = ""


@dataclass(kw_only=True)
class Ran:
    """A line of parts.csv."""

    part: str
    what: str
    outcome: str  # done, failed, late or skipped
    seconds: float = 0.0
    error: str = ""
    command: str = ""


@dataclass(kw_only=True)
class Tests:
    """A line of tests.csv."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failed_names: list[str] = field(default_factory=list)


def tests(out: Path, dry_run: bool) -> Iterator[Command]:
    path = "tests/gpu/test_cuda.py" if dry_run else "tests/gpu"
    words = ("-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-o", "addopts=", path)
    yield Command("tests", "", 75, words)


def encode(out: Path, dry_run: bool) -> Iterator[Command]:
    words = ["-m", "benchmarks.encode", "--adamw=dgc", f"--csv={out / 'encode.csv'}"]
    if dry_run:
        yield Command("encode", "", 60, [*words, "--layout=small", "--steps=1", "--device=cpu"])
        return
    words += ["--layout=resnet50,resnet18", "--steps=20", "--device=cuda"]
    yield Command("encode", "", 60, words)


def steps(out: Path, dry_run: bool) -> Iterator[Command]:
    model = ["--model=small", "--size=32", "--batch=4"] if dry_run else ["--model=torchvision.resnet50", "--size=224"]
    emulates = link.possible()
    for rate, (length, turns) in {0: (1, 1)}.items() if dry_run else STEPS.items():
        how = [f"--methods={METHODS}", f"--steps={length}", f"--turns={turns}", f"--record={rate}", *model]
        words = [*over(rate), "-m", "benchmarks.step_time", *how, f"--csv={out / 'steps.csv'}"]
        why_not = "this machine can't emulate links" if rate and not emulates else ""
        yield Command("steps", of(rate), 130 if rate == 100 else 60, words, why_not=why_not)
    gpt = ["--model=gpt_small", "--optimizer=adamw", "--size=1024", "--batch=1", "--methods=compute,ddp,fp16_hook,eden"]
    words = [*over(0), "-m", "benchmarks.step_time", *gpt, "--steps=3", "--turns=2", "--record=0"]
    if not dry_run:  # too large for a CPU
        yield Command("steps", "GPT-2 small", 60, [*words, f"--csv={out / 'steps.csv'}"])


def memory(out: Path, dry_run: bool) -> Iterator[Command]:
    how = ["--model=torchvision.resnet50", "--size=224", "--methods=ddp,dgc@all_gather,powersgd@all_gather"]
    if dry_run:
        how = ["--model=small", "--batch=4", "--methods=ddp,dgc@all_gather"]
    yield Command("memory", "", 75, ["-m", "benchmarks.memory", *how, f"--csv={out / 'memory.csv'}"])


def accuracy(out: Path, dry_run: bool) -> Iterator[Command]:
    rate = 1000 if not dry_run and link.possible() else 0
    words = ["-m", "benchmarks.time_to_accuracy", f"--rate-mbit={rate}", "--record", f"--csv={out / 'accuracy.csv'}"]
    tiny = "dgc:trainer.max_epochs=1;trainer.limit_train_batches=1;trainer.limit_val_batches=1;data.batch_size=4"
    words += [f"--methods={tiny}", "--seeds=0"] if dry_run else ["--methods=dgc,ddp", "--seeds=0,1,2,3,4"]
    yield Command("accuracy", of(rate), 600, words)


def over(rate: int) -> list[str]:
    """Words of `python` that start two ranks over a link of `rate` Mbit/s; 0 is loopback."""
    return ["-m", *link.emulated(2, 1, rate)]


def of(rate: int) -> str:
    return f"{rate} Mbit/s" if rate else "loopback"


PARTS = {each.__name__: each for each in (tests, encode, steps, memory, accuracy)}
"""The most valuable first."""


def run(command: Command, end: float, out: Path) -> Ran:
    """Run a command until its time limit, or until `end`, on the clock of `time.monotonic`."""
    seconds = min(command.seconds, end - time.monotonic() - GRACE)
    ran = Ran(part=command.part, what=command.what, outcome="skipped", command=" ".join(command.words))
    if command.why_not or seconds < GRACE:
        ran.error = command.why_not or "no time left"
        return ran
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        begin, arguments = time.monotonic(), [sys.executable, *command.words]
        process = subprocess.Popen(
            arguments, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            ran.outcome = "failed" if process.wait(seconds) else "done"
        except subprocess.TimeoutExpired:
            ran.outcome = "late"
            stop(process)
        ran.seconds = round(time.monotonic() - begin, 1)
        output.seek(0)
        printed = output.read()
    with open(out / "log.txt", "a") as log:
        log.write(f"===== {ran.part} {ran.what}: {ran.command}\n{printed}\n")
    if ran.outcome != "done":
        ran.error = "\n".join(printed.splitlines()[-12:]) or "no output"
    if command.part == "tests":
        append(out / "tests.csv", counted(printed))
    return ran


def stop(process: subprocess.Popen) -> None:
    """End a command and what it started; benchmarks.link removes its nodes first."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        for _ in range(10 * GRACE):
            process.poll()
            os.killpg(process.pid, 0)  # raises once nothing is left
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def counted(printed: str) -> Tests:
    """The outcomes of the tests that `pytest -v` ran."""
    found = Tests()
    for name, outcome in TEST.findall(printed):
        found.passed += outcome == "PASSED"
        found.skipped += outcome == "SKIPPED"
        if outcome in ("FAILED", "ERROR"):
            found.failed += 1
            found.failed_names.append(name)
    return found


def append(path: Path, line: Ran | Tests) -> None:
    """Add a line to a CSV."""
    row, new = asdict(line), not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if new:
            writer.writeheader()
        writer.writerow({key: "\n".join(value) if isinstance(value, list) else value for key, value in row.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder without earlier results")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    end, out = time.monotonic() + 60 * arguments.minutes, arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    commands = [command for part in arguments.parts.split(",") for command in PARTS[part](out, arguments.dry_run)]
    for command in commands:
        append(out / "parts.csv", ran := run(command, end, out))
        words = [ran.part, ran.what, ran.outcome, f"{ran.seconds} s", *ran.error.splitlines()[-1:]]
        print(", ".join(word for word in words if word), flush=True)


if __name__ == "__main__":
    main()
