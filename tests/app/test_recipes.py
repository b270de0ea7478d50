"""The table of recipes says what the recipes do."""

import subprocess
from pathlib import Path

import pytest

from lightning_gradcomp.app import recipes
from lightning_gradcomp.app.compose import choices, shipped
from lightning_gradcomp.app.config import name_of
from tests.app.test_compose import run_of

ROWS = {row[0]: dict(zip(recipes.HEAD, row, strict=True)) for row in recipes.rows()}


def test_every_recipe_has_a_row():
    assert sorted(ROWS) == choices()["recipe"]
    table = recipes.table()
    assert all(name in table for name in ROWS) and max(map(len, table.splitlines())) < 220


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_what_the_recipe_composes_to(name):
    row, run = ROWS[name], run_of(f"recipe={name}")
    assert row["model"] == run.model.name
    for group in ("compressor", "strategy"):
        assert row[group] == name_of(group, getattr(run, group))
    assert row["data"] == name_of("data", run.data)


@pytest.mark.parametrize("name", ROWS)
def test_what_nobody_has_run_says_so(name):
    text = (shipped("recipes") / f"{name}.yaml").read_text()
    assert ROWS[name]["measured"] == ("not by us" if "not measured by us" in text else "yes")
    assert ROWS[name]["measured"] == "not by us" or ROWS[name]["data"] == "digits"  # other data we never had


def test_the_docs_have_the_same_table():
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    table = {
        cells[0].strip("` "): cells for line in page.splitlines() if len(cells := line.strip("| ").split(" | ")) == 6
    }
    for name, row in ROWS.items():
        *_, compressor, measured = table[name]
        assert compressor.split("`")[1] == row["compressor"]
        assert measured.startswith("[yes]") == (row["measured"] == "yes")


def test_the_scripts_for_two_nodes_check_their_input(tmp_path):
    torchrun, slurm = (shipped("recipes") / name for name in ("two_nodes_torchrun.sh", "two_nodes.slurm"))
    for script in (torchrun, slurm):
        subprocess.run(["bash", "-n", script], check=True)
    asked = subprocess.run(["bash", torchrun], capture_output=True, text=True, env={"PATH": "/bin:/usr/bin"})
    assert asked.returncode and "MASTER: the address of the first machine" in asked.stderr
    environment = {"PATH": "/bin:/usr/bin", "MASTER": "host", "NODE": "0", "GPUS": "a[$(touch evaluated)]"}
    asked = subprocess.run(["bash", torchrun], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert asked.returncode == 1 and "GPUS: got 'a[$(touch evaluated)]', allowed: a whole number" in asked.stderr
    assert not (tmp_path / "evaluated").exists()
