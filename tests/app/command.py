"""The real command in a process of its own, with everything it starts ended after `timeout` seconds at the latest."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def gradcomp(folder: Path, *arguments: str, timeout: float = 60, package: Path = ROOT, **environment: str):
    """Run `gradcomp *arguments` in `folder`, with the package from `package`."""
    process = subprocess.Popen(
        [sys.executable, str(package / "gradcomp_command.py"), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(package), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its process group is then the whole tree
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
