"""The training process: a fresh one for each run, so that a sweep's jobs can't inherit anything from each other.

Lightning starts the other ranks by running this process's command again. Under Hydra that would be the whole sweep;
here it is `python -m lightning_gradcomp.app.train FOLDER`, and what Lightning leaves behind (environment variables,
thread counts, process groups) ends with the process.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path


def train(folder: Path) -> int:
    """Train the run in `folder`, and wait for its end: 0, or what the process failed with."""
    return run("train", str(folder))


def run(module: str, *words: str) -> int:
    """Run `python -m lightning_gradcomp.app.MODULE WORDS`, and wait for its end: 0, or what it failed with.

    Raises:
        SystemExit: a signal asked this process to stop; the child has then ended before.
    """
    child = subprocess.Popen([sys.executable, "-m", f"lightning_gradcomp.app.{module}", *words])
    received: list[int] = []

    def stop(number: int, _: object) -> None:
        received.append(number)
        if number == signal.SIGTERM:  # from `timeout` or a batch system; a Ctrl-C reaches both through the terminal
            child.terminate()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    code = child.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    if received:  # the exit that ends a sweep too, with the shell's code for the signal
        sys.exit(128 + received[0])
    return code
