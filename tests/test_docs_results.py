"""What a recipe says of its result is what docs/results.csv says."""

from statistics import mean, stdev

import pytest
import yaml

from benchmarks import results
from tests.pages import DOCS

ROOT = DOCS.parent
RECIPES = {"digits": "folds", "digits_dga": "seeds", "digits_resnet50": "folds", "digits_swin": "folds"}
"""Recipe -> of which runs it tells: of a cross-validation, or of the fixed split."""


def accuracies(model, method, split):
    runs = results.read_csv()
    if split == "seeds":
        return [run.percent for run in results.grouped(runs)[model, method]]
    steps = 1320 if model == "swin_mini" else 220
    return [run.percent for run in results.cross_validated(runs)[model, 2, steps, method]]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_s_result_is_that_of_its_runs(name):
    text, split = (ROOT / "recipes" / f"{name}.yaml").read_text(), RECIPES[name]
    choices = {key: value for entry in yaml.safe_load(text)["defaults"] for key, value in entry.items()}
    method = "dga" if choices.get("override /strategy") == "dga" else choices["override /compressor"]
    found, dense = (accuracies(choices["override /model"], each, split) for each in (method, "none"))
    reached = f"{mean(found):.1f} % ± {stdev(found):.1f} after {30 if name == 'digits_swin' else 10} epochs"
    beside = f"({len(found)} {split}, N=2; dense {mean(dense):.1f} ± {stdev(dense):.1f})"
    assert f"# Result: {reached} {beside}, measured: docs/results.md\n" in text
