"""The complete scripts in docs/examples/ train, side by side, in processes of their own."""

import contextlib
import re
import socket
import time

from tests.pages import DOCS
from tests.processes import Forked, start_world

EXAMPLES = DOCS / "examples"
WORLDS = {"hsdp_digits.py": (4, 1), "transformer_text.py": (2, 1)} | dict.fromkeys(
    ("lightning_digits.py", "pytorch_digits.py", "fine_tuning.py", "own_compressor.py"), (2, 2)
)
"""Ranks and epochs: with DGC and SGD a dense one, and one at 90 %."""


def test_the_examples_train_as_they_stand():
    started = {name: start_world(world, str(EXAMPLES / name), str(epochs)) for name, (world, epochs) in WORLDS.items()}
    started["fabric_digits.py"] = [Forked(str(EXAMPLES / "fabric_digits.py"), "2")]  # by Fabric's own launcher
    assert {*started, "two_machines.py", "parameter_server.py"} == {path.name for path in EXAMPLES.glob("*.py")}
    for name, ranks in started.items():
        for done in [rank.end() for rank in ranks]:
            assert done.returncode == 0, f"{name}\n{done.stdout}"
        output = "".join(rank.output for rank in ranks)
        kind, result, ratio = re.search(r"(accuracy|loss) ([\d.]+)%?, ratio of the last step (\d+)", output).groups()
        assert float(result) > 50 if kind == "accuracy" else float(result) < 4, name  # a uniform guess: loss 5.5
        assert int(ratio) > 5, name
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 75


def test_a_server_and_two_workers_train():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        host, port = probe.getsockname()
    script, words, secret = str(EXAMPLES / "parameter_server.py"), (f"{host}:{port}", "4"), {"SECRET": "word"}
    server = Forked(script, "server", *words, env=secret)
    while server.process.is_alive():
        with contextlib.suppress(OSError), socket.create_connection((host, port)):
            break
        time.sleep(0.1)
    workers = [Forked(script, "worker", *words, env=secret) for _ in range(2)]
    for process in (*workers, server):
        assert process.end().returncode == 0, process.output
    accuracies = re.findall(r"accuracy ([\d.]+)%, ratio of the last step \d", "".join(w.output for w in workers))
    assert len(accuracies) == 2 and all(float(accuracy) > 50 for accuracy in accuracies)


def test_the_script_for_two_machines_trains_over_gloo():
    done = [rank.end() for rank in start_world(2, str(EXAMPLES / "two_machines.py"), "dgc", "gloo", "3")]
    assert [rank.returncode for rank in done] == [0, 0], done[0].stdout
    assert "ms a step" in done[0].stdout and "The first steps will show what is quickest" in done[0].stdout
