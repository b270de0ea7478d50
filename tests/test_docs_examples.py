"""The complete scripts in docs/examples/ train, side by side, in processes of their own."""

import re

from tests.pages import DOCS
from tests.processes import Forked, start_world

EXAMPLES = DOCS / "examples"
EPOCHS = "2"
"""A dense one, and one at 90 %."""


def test_the_examples_train_as_they_stand():
    worlds = {"lightning_digits.py": 2, "pytorch_digits.py": 2, "hsdp_digits.py": 4}
    started = {name: start_world(world, str(EXAMPLES / name), EPOCHS) for name, world in worlds.items()}
    started["fabric_digits.py"] = [Forked(str(EXAMPLES / "fabric_digits.py"), EPOCHS)]  # by Fabric's own launcher
    assert {*started, "two_machines.py"} == {path.name for path in EXAMPLES.glob("*.py")}
    for name, ranks in started.items():
        for done in [rank.end() for rank in ranks]:
            assert done.returncode == 0, f"{name}\n{done.stdout}"
        output = "".join(rank.output for rank in ranks)
        accuracy, ratio = re.search(r"accuracy ([\d.]+)%, ratio of the last step (\d+)", output).groups()
        assert float(accuracy) > 50, name
        assert int(ratio) > 5, name
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 65


def test_the_script_for_two_machines_trains_by_strategy():
    done = [rank.end() for rank in start_world(2, str(EXAMPLES / "two_machines.py"), "dgc", "3")]
    assert [rank.returncode for rank in done] == [0, 0], done[0].stdout
    assert "ms a step" in done[0].stdout and "The first steps will show what is quickest" in done[0].stdout
