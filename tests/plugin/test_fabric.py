"""Fabric trains with the same averaging."""

import sys
from pathlib import Path

from tests.processes import run


def test_a_fabric_script_trains():
    done = run(sys.executable, str(Path(__file__).with_name("fabric_script.py")))
    assert done.returncode == 0, done.stdout
    assert "sparsity=0.999 steps=35 apart=0.0" in done.stdout
    assert "learned=True" in done.stdout
