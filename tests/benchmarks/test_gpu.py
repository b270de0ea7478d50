"""The script of all GPU measurements: each part writes its CSV on a CPU too, and a part that fails stops no other."""

import json
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

from benchmarks import encode, gpu, memory, methods, time_to_accuracy
from tests.processes import run_world

ROOT = Path(__file__).parents[2]
COLUMNS = {
    "encode": "layout elements method optimizer compress_ms decompress_ms step_ms gb_per_s copy_gb_per_s error machine",
    "steps": "network ranks rate_mbit delay_ms method ms compute_ms bytes_sent node_bytes "
    "compress_ms exchange_ms decompress_ms machine",
}
LINES = {"encode": 3 + 7, "steps": 7}
"""At least so many: there may be more methods."""


def run_forked(words):
    """Run `python WORDS` on forked ranks, without a launcher, which saves their imports."""
    ranks = 2 if "--" in words else 1
    *_, module = (word for word in words if word.startswith("benchmarks."))
    path = ROOT / f"{module.replace('.', '/')}.py"
    run_world(ranks, str(path), *words[[*words].index(module) + 1 :])


@pytest.mark.parametrize("part", COLUMNS)
def test_a_part_writes_its_csv_without_errors(part, tmp_path):
    for command in gpu.PARTS[part](tmp_path, dry_run=True):
        run_forked(command.words)
    found = pd.read_csv(tmp_path / f"{part}.csv")
    assert list(found) == COLUMNS[part].split()
    assert len(found) >= LINES[part]
    assert "error" not in found or found["error"].isna().all(), found["error"].dropna().tolist()


@pytest.fixture
def result(tmp_path):
    """`link.result` on forked ranks."""

    def run_forked(launcher, module, *words):
        place = tmp_path / "result.json"
        run_world(2, str(ROOT / f"{module.replace('.', '/')}.py"), *words, "--place", str(place))
        return json.loads(place.read_text()), ""

    return run_forked


def test_the_memory_of_two_methods_is_recorded(tmp_path, monkeypatch, result):
    monkeypatch.setattr(memory, "result", result)
    [command] = gpu.memory(tmp_path, dry_run=True)
    monkeypatch.setattr(sys, "argv", list(command.words[1:]))
    memory.main()
    found = pd.read_csv(tmp_path / "memory.csv")
    assert list(found["method"]) == ["ddp", "dgc@all_gather"]
    assert (found["mb"] > 0).all() and (found["ranks"] == 2).all()


def test_a_run_of_the_digits_is_recorded_over_loopback(tmp_path, monkeypatch, result):
    monkeypatch.setattr(time_to_accuracy, "result", result)
    [command] = gpu.accuracy(tmp_path, dry_run=True)
    monkeypatch.setattr(sys, "argv", [*command.words[1:], "--accuracy=0"])
    time_to_accuracy.main()
    [run] = pd.read_csv(tmp_path / "accuracy.csv").to_dict("records")
    assert (run["rate_mbit"], run["method"], run["seed"], run["bytes_sent"]) == (0, "dgc", 0, 0)
    assert run["reached"] == run["seconds"]


def test_a_method_that_fails_is_a_line_with_its_error():
    found = encode.compressed(methods.small, [("nonsense", "sgd"), ("twobit", "sgd")], torch.device("cpu"), steps=1)
    assert found["nonsense", "sgd"].error.startswith("ValueError") and not found["nonsense", "sgd"].times
    assert not found["twobit", "sgd"].error and len(found["twobit", "sgd"].times) == 1


STARTS_ANOTHER = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
time.sleep(60)
"""


def command(code, seconds=60.0):
    return gpu.Command("encode", "", seconds, ("-c", code))


def running(pid):
    """Whether a process runs; it may have ended without a parent that waits for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_failure_and_a_late_command_are_lines_and_the_next_command_runs(tmp_path, monkeypatch):
    commands = [command("raise ValueError('three')"), command(STARTS_ANOTHER, seconds=2), command("print('fine')")]
    monkeypatch.setattr(gpu, "GRACE", 1)
    monkeypatch.setattr(gpu, "PARTS", {"encode": lambda out, dry_run: commands})
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path)])
    gpu.main()
    failed, late, fine = pd.read_csv(tmp_path / "parts.csv", keep_default_na=False).to_dict("records")
    assert failed["outcome"] == "failed" and failed["error"].endswith("ValueError: three")
    assert late["outcome"] == "late" and not running(late["error"])
    assert fine["outcome"] == "done" and not fine["error"]
    log = (tmp_path / "log.txt").read_text()
    assert "ValueError: three" in log and "fine" in log


def test_nothing_starts_without_time(tmp_path):
    ran = gpu.run(command("raise ValueError"), time.monotonic() + gpu.GRACE, tmp_path)
    assert (ran.outcome, ran.error) == ("skipped", "no time left")


def test_tests_are_counted_as_far_as_they_came():
    printed = """
tests/gpu/test_cuda.py::test_a[DGC-int8] PASSED                          [  1%]
tests/gpu/test_cuda.py::test_a[a b] FAILED                               [  2%]
tests/gpu/test_cuda.py::test_b SKIPPED (needs a GPU)                     [  3%]
tests/gpu/test_cuda.py::test_c ERROR                                     [  4%]
tests/gpu/test_cuda.py::test_d """
    names = ["tests/gpu/test_cuda.py::test_a[a b]", "tests/gpu/test_cuda.py::test_c"]
    assert gpu.counted(printed) == gpu.Tests(passed=1, failed=2, skipped=1, failed_names=names)
