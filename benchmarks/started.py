"""Ranks that a benchmark starts for itself on this machine, one thread each; and the device of a rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch


def result(module: str, world: int, words: list[str]) -> Any:
    """What rank 0 of `world` ranks of `python -m MODULE WORDS --place FILE` writes to FILE, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "result.json")
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        command = [sys.executable, *ranks, "-m", module, *words, "--place", str(place)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return json.loads(place.read_text())


def device() -> torch.device:
    """This rank's: a GPU where there is one. Where a node has fewer GPUs than ranks, ranks share them."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def wait(device: torch.device) -> None:
    """Until a GPU has done all that it was told to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
