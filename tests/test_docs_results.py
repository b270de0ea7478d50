"""What a recipe says of its result is what docs/results.csv says."""

from statistics import mean, stdev

import pytest
import yaml

from benchmarks import results
from tests.pages import DOCS

ROOT = DOCS.parent
RUNS = results.grouped(results.read_csv())
RECIPES = ("digits", "digits_dga", "digits_resnet50", "digits_swin")


def accuracies(model, method):
    return [run.percent for run in RUNS[model, method]]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_s_result_is_that_of_its_runs(name):
    text = (ROOT / "recipes" / f"{name}.yaml").read_text()
    choices = {key: value for entry in yaml.safe_load(text)["defaults"] for key, value in entry.items()}
    method = "dga" if choices.get("override /strategy") == "dga" else choices["override /compressor"]
    found, dense = (accuracies(choices["override /model"], each) for each in (method, "none"))
    reached = f"{mean(found):.1f} % ± {stdev(found):.1f} after {30 if name == 'digits_swin' else 10} epochs"
    beside = f"({len(found)} seeds, N=2; dense {mean(dense):.1f} ± {stdev(dense):.1f})"
    assert f"# Result: {reached} {beside}, measured: docs/results.md\n" in text
