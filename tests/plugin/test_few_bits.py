"""Averages in few bits inside DDP. One run of `few_bits_script.py` on two ranks serves all tests."""

from pathlib import Path

import pytest

from tests.processes import outcomes

FEATURES = [
    "accumulation", "unused_parameters", "static_graph", "gradient_as_bucket_view", "many_buckets",
    "manual_optimization", "no_sync", "several_optimizers", "freezing", "low_precision",
]  # fmt: skip


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """What a feature came to, by its name in the script."""
    return outcomes(Path(__file__).with_name("few_bits_script.py"), tmp_path_factory.mktemp("few_bits"))


@pytest.mark.parametrize("feature", FEATURES)
def test_it_trains_nearly_as_dense_averages_do(result, feature):
    for method, outcome in result(feature).items():
        assert outcome["replicas_apart"] == 0
        # AdamW, of several optimizers, makes more of a small gradient's rounding.
        assert 0 < outcome["apart"] < {"int8": 0.02, "eden": 0.2}[method]
        # Of a model of which a third is biases and padding, or of which 4 bits leave out the narrow rows.
        assert outcome["ratio"] > {"int8": 1.8, "eden": 1}[method]
        assert outcome["threads_left"] == 0


def test_a_rank_without_data_contributes_zeros(result):
    for outcome in result("uneven_inputs").values():
        assert outcome["replicas_apart"] == 0 < outcome["apart"] < 0.1


def test_gradients_with_a_graph_are_averaged(result):
    assert result("gradients_with_a_graph") == {"int8": 0, "eden": 0}


@pytest.mark.parametrize("other", ["resumed", "small buckets", "averager"])
def test_a_mean_does_not_depend_on_the_buckets(result, other):
    assert {outcome[other] for outcome in result("same_whatever_the_buckets").values()} == {0}


def test_the_closures_of_a_step_see_one_function(result):
    """The line search of LBFGS compares their values and gradients."""
    assert result("closures") == {"apart": [0, 0, 0], "replicas_apart": 0}


def test_a_bucket_is_exchanged_while_backward_computes_the_next_one(result):
    assert result("overlap") == [True, True]
