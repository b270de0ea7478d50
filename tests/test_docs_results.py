"""What a recipe says of its result is what docs/data/results.csv or text.csv says."""

from statistics import mean, stdev

import pytest
import yaml

from benchmarks import language_models, report, results
from tests.pages import DOCS

ROOT = DOCS.parent
RECIPES = {
    "digits": ("dgc", "folds", 10, 220),
    "digits_dga": ("dga K=8 D=8", "seeds", 10, 220),
    "digits_resnet50": ("dgc", "folds", 10, 220),
    "digits_sparseloco": ("sparseloco K=8 D=0", "folds", 30, 1320),
    "digits_swin": ("eden", "folds", 30, 1320),
}
"""Recipe -> of which runs it tells: method, of a cross-validation or of the fixed split, epochs and steps."""
TEXTS = {
    "stdlib_gpt": ("eden", "AdamW"),
    "stdlib_gpt_muon": ("int8", "Muon"),
    "stdlib_gpt_muloco": ("muloco K=30 D=0", "Muon"),
    "stdlib_gpt_sparseloco": ("sparseloco K=8 D=0", "AdamW"),
}
"""Recipe of a language model -> method and optimizer."""


def pairs(model, method, split, steps, dirichlet=None, ranks=2):
    runs = [each for each in results.read_csv() if (each.fold is not None) == (split == "folds")]
    of = results.by_setting(runs)[results.Setting(model, dirichlet, ranks, steps)]
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


def test_the_federated_recipe_s_result_is_that_of_its_runs():
    found, dense = zip(*pairs("swin_mini", "dga K=8 D=8", "folds", 2670, dirichlet=0.3, ranks=4), strict=True)
    beside = f"({len(found)} folds, N=4; dense {report.spread(dense)})"
    result = f"# Result: {mean(found):.1f} % ± {stdev(found):.1f} after 30 epochs {beside}, measured: docs/data/"
    assert result in (ROOT / "recipes" / "digits_federated.yaml").read_text()


@pytest.mark.parametrize("name", TEXTS)
def test_a_language_model_s_result_is_that_of_its_runs(name):
    text = (ROOT / "recipes" / f"{name}.yaml").read_text()
    method, optimizer = TEXTS[name]
    of = {"none": [], method: []}
    for each in language_models.read_csv():
        if (each.optimizer, each.ranks, each.steps) == (optimizer, 2, 600) and each.method in of:
            of[each.method].append(each)
    found, dense = zip(*report.pairs(of[method], of["none"]), strict=True)
    reached = f"{report.spread(found, 3)} nats per byte after 6 epochs"
    beside = f"({len(found)} seeds, N=2; dense {report.spread(dense, 3)})"
    assert f"# Result: {reached} {beside}, measured: docs/results.md\n" in text
