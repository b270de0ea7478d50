"""Scripts run in real processes. Each is killed, with everything it started, when its time is up."""

import contextlib
import json
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch


def run(
    *command: str, timeout: float = 120, env: dict[str, str] | None = None, cwd: str | None = None
) -> subprocess.CompletedProcess:
    """Run `command` to its end in its own process group. Fails, with the output, if it takes longer than `timeout`."""
    process = subprocess.Popen(
        command,
        env=_environment(env),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{command} still ran after {timeout} s:\n{output}") from None
    return subprocess.CompletedProcess(command, process.returncode, output)


def _environment(more: dict[str, str] | None) -> dict[str, str]:
    """This process's environment without leftovers of an earlier Trainer, plus `more`."""
    return {**{key: value for key, value in os.environ.items() if not key.startswith("PL_")}, **(more or {})}


class Forked:
    """A running Python script in its own process group; `end` waits for it.

    Its process is forked from one that has imported the package and the command, which saves several seconds. Start it
    from the main thread: multiprocessing's list of children is not thread-safe.
    """

    def __init__(self, script: str, *arguments: str, timeout: float = 120, env: dict[str, str] | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["lightning_gradcomp.app.train"])
        reader, writer = context.Pipe(duplex=False)
        self.command, self.timeout, self.output, self.late = [script, *arguments], timeout, "", False
        self.process = context.Process(target=_be_a_script, args=(_environment(env), writer, self.command))
        self.process.start()
        writer.close()
        self.limit = threading.Timer(timeout, self._time_is_up)  # even if nobody waits
        self.listener = threading.Thread(target=self._listen, args=(reader,))
        for thread in (self.limit, self.listener):
            thread.daemon = True
            thread.start()

    def _listen(self, reader: Connection) -> None:
        """Read output until the script and all processes it started, which share the pipe, have ended."""
        with reader, open(reader.fileno(), closefd=False, errors="replace") as pipe:
            self.output = pipe.read()
        self.limit.cancel()

    def _time_is_up(self) -> None:
        self.late = True
        self.kill()

    def kill(self) -> None:
        """Kill the script with everything it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> subprocess.CompletedProcess:
        """Wait. Fails, with the output, if the script or anything it started exceeds the timeout."""
        self.listener.join(self.timeout + 10)
        assert not self.late, f"{self.command} still ran after {self.timeout} s:\n{self.output}"
        self.process.join()
        return subprocess.CompletedProcess(self.command, self.process.exitcode, self.output)


def free_port() -> int:
    """A free port below those that Linux gives to outgoing connections, which might take it before rank 0 does."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)  # not seeded: each test process draws its own
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def start_world(world: int, script: str, *arguments: str, timeout: float = 120) -> list[Forked]:
    """Start a Python script on `world` ranks of one node, as an external launcher would."""
    port = free_port()
    shared = {
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    own = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    return [Forked(script, *arguments, timeout=timeout, env=environment) for environment in own]


def run_world(world: int, script: str, *arguments: str, timeout: float = 120) -> str:
    """Run a script to its end on `world` ranks. Returns rank 0's output."""
    outputs, told = [], []
    for number, rank in enumerate(start_world(world, script, *arguments, timeout=timeout)):
        try:
            done = rank.end()
        except AssertionError as late:
            told.append(f"rank {number}: {late}")
            continue
        outputs.append(done.stdout)
        if done.returncode:
            told.append(f"rank {number}:\n{done.stdout}")
    assert not told, "\n".join(told)
    return outputs[0]


def outcomes(script: Path, folder: Path, timeout: float = 120) -> Callable[[str], Any]:
    """Run a script of named scenarios on two ranks. Returns what each came to, by name; fails if the scenario failed.

    Its last line is JSON: name -> {"result": ...} or {"failed": ...}.
    """
    outcome = json.loads(run_world(2, str(script), str(folder), timeout=timeout).splitlines()[-1])

    def of(scenario: str) -> Any:
        if "failed" in outcome[scenario]:
            pytest.fail(outcome[scenario]["failed"])
        return outcome[scenario]["result"]

    return of


def _be_a_script(environment: dict[str, str], output: Connection, argv: list[str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    torch.set_num_threads(1)
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    runpy.run_path(argv[0], run_name="__main__")
