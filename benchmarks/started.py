"""Ranks that a benchmark starts for itself on this machine, one thread each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def result(module: str, world: int, words: list[str]) -> Any:
    """What rank 0 of `world` ranks of `python -m MODULE WORDS --place FILE` writes to FILE, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "result.json")
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        command = [sys.executable, *ranks, "-m", module, *words, "--place", str(place)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return json.loads(place.read_text())
