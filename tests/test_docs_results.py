"""What a recipe says of its result is what docs/data/results.csv says."""

from statistics import mean, stdev

import pytest
import yaml

from benchmarks import report, results
from tests.pages import DOCS

ROOT = DOCS.parent
RECIPES = {
    "digits": ("dgc", "folds", 10, 220),
    "digits_dga": ("dga K=8 D=8", "seeds", 10, 220),
    "digits_resnet50": ("dgc", "folds", 10, 220),
    "digits_sparseloco": ("sparseloco K=8 D=0", "folds", 30, 1320),
    "digits_swin": ("dgc", "folds", 30, 1320),
}
"""Recipe -> of which runs it tells: method, of a cross-validation or of the fixed split, epochs and steps."""


def pairs(model, method, split, steps):
    runs = [each for each in results.read_csv() if (each.fold is not None) == (split == "folds")]
    of = results.by_setting(runs)[results.Setting(model, None, 2, steps)]
    return report.pairs(of[method], of["none"])


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_s_result_is_that_of_its_runs(name):
    text = (ROOT / "recipes" / f"{name}.yaml").read_text()
    method, split, epochs, steps = RECIPES[name]
    choices = {key: value for entry in yaml.safe_load(text)["defaults"] for key, value in entry.items()}
    found, dense = zip(*pairs(choices["override /model"], method, split, steps), strict=True)
    reached = f"{mean(found):.1f} % ± {stdev(found):.1f} after {epochs} epochs"
    beside = f"({len(found)} {split}, N=2; dense {mean(dense):.1f} ± {stdev(dense):.1f})"
    assert f"# Result: {reached} {beside}, measured: docs/results.md\n" in text
