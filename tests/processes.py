"""Scripts and tests run in real processes. Each is killed, with everything it started, when its time is up."""

import contextlib
import functools
import gc
import importlib
import logging
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
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

    Args:
        script: a path.
        arguments: its command line.
        timeout: seconds after which it is killed.
        env: variables to add.
        calls: run no script: answer the calls of tests in this file that come through the connection.
    """

    def __init__(
        self,
        script: str,
        *arguments: str,
        timeout: float = 120,
        env: dict[str, str] | None = None,
        calls: Connection | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["lightning_gradcomp.app.train"])
        reader, writer = context.Pipe(duplex=False)
        self.command, self.timeout, self.output, self.late = [script, *arguments], timeout, "", False
        self.process = context.Process(target=_begin, args=(_environment(env), writer, self.command, calls))
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
    return [Forked(script, *arguments, timeout=timeout, env=environment) for environment in _ranks(world)]


def _ranks(world: int) -> list[dict[str, str]]:
    """The variables that a launcher sets for each rank."""
    port = free_port()
    shared = {
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


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


class World:
    """Ranks in processes that call the tests of one file. They start once, and each test costs what it does itself."""

    def __init__(self, size: int, file: str) -> None:
        self.ranks, self.calls = [], []
        for environment in _ranks(size):
            own, its = multiprocessing.Pipe()
            self.ranks.append(Forked(file, timeout=600, env=environment, calls=its))
            self.calls.append(own)
            its.close()

    def call(self, module: str, test: str, arguments: dict[str, Any], timeout: float) -> dict[int, str]:
        """Call a test on all ranks. Returns what went wrong, by rank."""
        for calls in self.calls:
            calls.send((module, test, arguments))
        waiting, failed, end = dict(enumerate(self.calls)), {}, time.monotonic() + timeout
        while waiting:
            ready = wait(waiting.values(), max(0.0, end - time.monotonic()))
            if not ready:
                return failed | dict.fromkeys(waiting, "did not end")
            for rank in [rank for rank, calls in waiting.items() if calls in ready]:
                try:
                    error = waiting.pop(rank).recv()
                except EOFError:
                    error = f"died\n{self.ranks[rank].end().stdout}"
                if error:
                    failed[rank] = error
                    end = min(end, time.monotonic() + 10)  # the others may wait for this one
        return failed

    def end(self) -> None:
        for calls, rank in zip(self.calls, self.ranks, strict=True):
            calls.close()
            rank.kill()
            rank.process.join()


_worlds: dict[tuple[str, int], World] = {}


def on_ranks(size: int, timeout: float = 120) -> Callable[[Callable], Callable]:
    """The test runs in `size` processes, each a rank, and passes if it passes on all.

    What is cached in a rank stays there for the other tests of the file. A failure ends the ranks.
    """

    def decorate(test: Callable) -> Callable:
        module = sys.modules[test.__module__]

        @functools.wraps(test)
        def on_all(**arguments: Any) -> None:
            key = module.__name__, size
            if key not in _worlds:
                _worlds[key] = World(size, module.__file__)
            failed = _worlds[key].call(module.__name__, test.__name__, arguments, timeout)
            if failed:
                _worlds.pop(key).end()
                pytest.fail("\n".join(f"rank {rank}: {error}" for rank, error in failed.items()), pytrace=False)

        return on_all

    return decorate


def end_worlds() -> None:
    """End the ranks of this file's tests."""
    while _worlds:
        _worlds.popitem()[1].end()


def _begin(environment: dict[str, str], output: Connection, argv: list[str], calls: Connection | None) -> None:
    """What a forked process does."""
    gc.freeze()  # a collection of garbage would write to, and so copy, the memory of all imports
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    torch.set_num_threads(1)
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    if calls is None:
        runpy.run_path(argv[0], run_name="__main__")
    else:
        _answer(calls)


def _answer(calls: Connection) -> None:
    """Call tests on this rank until no more are asked for."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with contextlib.suppress(EOFError):
        while True:
            module, test, arguments = calls.recv()
            error = None
            try:
                getattr(importlib.import_module(module), test).__wrapped__(**arguments)
            except BaseException:
                error = traceback.format_exc()
            calls.send(error)
