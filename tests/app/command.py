"""The real command in a process group of its own, which ends after `timeout` seconds at the latest."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def gradcomp(folder: Path, *words: str, timeout: float = 120, package=ROOT):
    """Runs `python -m lightning_gradcomp WORDS` in `folder`, with the package from `package`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_gradcomp", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(package)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its process group is then the whole tree
        preexec_fn=lambda: os.nice(10),  # several at a time, beside tests that wait for less
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        raise AssertionError(f"{words} still ran after {timeout} s:\n{output}\n{errors}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
