"""Scripts run in real processes, each killed with everything it started when its time is up."""

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch


def run(
    *command: str, timeout: float = 120, env: dict[str, str] | None = None, cwd: str | None = None
) -> subprocess.CompletedProcess:
    """Run `command` to its end in a process group of its own; fails, with the output, when it takes longer."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PL_")}
    process = subprocess.Popen(
        command,
        env={**clean, **(env or {})},
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


def run_world(world: int, script: str, *arguments: str, timeout: float = 120) -> str:
    """Run a Python script on `world` ranks of one node, as a launcher from outside would; returns rank 0's output.

    The ranks are forked from a process that has imported the package, which spares each of them several seconds.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning_gradcomp"])
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(rank)) for rank in range(world)]
        processes = []
        for rank, output in enumerate(outputs):
            environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(target=_be_a_rank, args=(environment, output, [script, *arguments]))
            process.start()
            processes.append(process)
        for process in processes:
            process.join(max(0, deadline - time.monotonic()))
        late = [process for process in processes if process.exitcode is None]
        for process in late:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        failed = [rank for rank, process in enumerate(processes) if process.exitcode]
        told = "\n".join(f"rank {rank}:\n{outputs[rank].read_text()}" for rank in failed)
        assert not failed, f"still ran after {timeout} s\n{told}" if late else told
        return outputs[0].read_text()


def _be_a_rank(environment: dict[str, str], output: Path, argv: list[str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    runpy.run_path(argv[0], run_name="__main__")
