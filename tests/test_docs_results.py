"""Figures in the pages are those of docs/results.csv. After further runs: python -m benchmarks.results FOLDER."""

import re
from statistics import mean, stdev

import pytest
import yaml

from benchmarks import results
from tests.pages import DOCS

ROOT = DOCS.parent
RUNS = results.grouped(results.read_csv())
RECIPES = ("digits", "digits_dga", "digits_resnet50", "digits_swin")
PROSE = {"docs/results.md", "docs/compressors.md", "README.md"}


def accuracies(model, method):
    return [run.percent for run in RUNS[model, method]]


@pytest.mark.parametrize("page", results.PAGES, ids=lambda page: page.stem)
def test_the_tables_are_those_of_the_runs(page):
    assert page.read_text() == results.filled(page, results.read_csv())


@pytest.mark.parametrize("page", sorted(PROSE))
def test_every_mean_and_spread_is_that_of_a_method(page):
    """Signed figures are differences to dense, with an interval."""
    methods = [*RUNS.values(), *results.cross_validated(results.read_csv()).values()]
    known = {results.accuracy(runs).rpartition(" ")[0] for runs in methods if len(runs) > 1}
    told = re.findall(r"(?<![-+\d])\d+\.\d\d ± \d+\.\d\d", (ROOT / page).read_text())
    assert told and set(told) <= known


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_s_result_is_that_of_its_runs(name):
    text = (ROOT / "recipes" / f"{name}.yaml").read_text()
    choices = {key: value for entry in yaml.safe_load(text)["defaults"] for key, value in entry.items()}
    method = "dga" if choices.get("override /strategy") == "dga" else choices["override /compressor"]
    found, dense = (accuracies(choices["override /model"], each) for each in (method, "none"))
    reached = f"{mean(found):.1f} % ± {stdev(found):.1f} after {30 if name == 'digits_swin' else 10} epochs"
    beside = f"({len(found)} seeds, N=2; dense {mean(dense):.1f} ± {stdev(dense):.1f})"
    assert f"# Result: {reached} {beside}, measured: docs/results.md\n" in text
