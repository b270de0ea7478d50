"""Scripts run in real processes, each killed with everything it started when its time is up."""

import os
import signal
import socket
import subprocess
import sys


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
    """Run a Python script on `world` ranks of one node, as a launcher from outside would; returns rank 0's output."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0", "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, script, *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    failed = [f"rank {rank}:\n{outputs[rank]}" for rank, process in enumerate(processes) if process.returncode]
    assert not failed, "\n".join(failed)
    return outputs[0]
