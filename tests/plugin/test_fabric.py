"""Fabric trains with the same averaging."""

from pathlib import Path

from tests.processes import Forked


def test_a_fabric_script_trains():
    done = Forked(str(Path(__file__).with_name("fabric_script.py"))).end()
    assert done.returncode == 0, done.stdout
    assert "sparsity=0.999 steps=35 apart=0.0" in done.stdout
    assert "learned=True" in done.stdout
