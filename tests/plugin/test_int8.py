"""Averages in 8 bits inside DDP. One run of `int8_script.py` on two ranks serves all tests."""

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
    return outcomes(Path(__file__).with_name("int8_script.py"), tmp_path_factory.mktemp("int8"))


@pytest.mark.parametrize("feature", FEATURES)
def test_it_trains_nearly_as_dense_averages_do(result, feature):
    outcome = result(feature)
    assert outcome["replicas_apart"] == 0
    assert 0 < outcome["apart"] < 0.02  # AdamW, of several optimizers, makes more of a small gradient's rounding
    assert outcome["ratio"] > 1.8  # of a model of which a third is biases and padding
    assert outcome["threads_left"] == 0


def test_a_rank_without_data_contributes_zeros(result):
    outcome = result("uneven_inputs")
    assert outcome["replicas_apart"] == 0 < outcome["apart"] < 0.01


@pytest.mark.parametrize("other", ["resumed", "small buckets", "averager"])
def test_a_mean_does_not_depend_on_the_buckets(result, other):
    assert result("same_whatever_the_buckets")[other] == 0


def test_the_closures_of_a_step_see_one_function(result):
    """The line search of LBFGS compares their values and gradients."""
    assert result("closures") == {"apart": [0, 0, 0], "replicas_apart": 0}


def test_a_bucket_is_exchanged_while_backward_computes_the_next_one(result):
    assert result("overlap") == [True, True]
