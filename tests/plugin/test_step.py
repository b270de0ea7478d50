"""Hooks, modules and optimizers that meddle with a step. One run of `step_script.py` on two ranks serves all tests."""

import re
from pathlib import Path

import pytest

from tests.processes import outcomes


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """What a scenario came to, by its name in the script."""
    return outcomes(Path(__file__).with_name("step_script.py"), tmp_path_factory.mktemp("step"), timeout=110)


def check_raised(raised, kind, message):
    """Every rank has raised it."""
    assert [name for name, _ in raised] == [kind, kind], raised
    assert all(re.search(message, said) for _, said in raised), raised


# Gradients


def test_filled_gradients_are_as_under_ddp(result):
    for case, (replicas_apart, from_ddp) in result("filled_gradients").items():
        assert replicas_apart == 0, case
        assert from_ddp <= 1e-6, case


def test_a_layer_stays_while_its_gradients_are_discarded_and_goes_on_as_at_the_start(result):
    for case, (moved, first_step, replicas_apart) in result("discarded_gradients").items():
        assert moved == replicas_apart == 0, case
        assert 0.4 < first_step < 2.5, case


def test_zeros_written_past_torch_count(result):
    for case, moved in result("written_gradients").items():
        assert moved == 0, case


# Steps


def test_a_batch_without_a_step_moves_nothing(result):
    for case, seen in result("left_out_steps").items():
        assert seen == [0, 3, 0], case


def test_a_save_in_a_step_is_that_of_the_step_before_and_resumes(result):
    for case, seen in result("saved_in_a_step").items():
        assert seen == [0, 3, 0], case


def test_an_error_in_a_step_leaves_the_weights_of_the_step_before_on_all_ranks(result):
    for case, (raised, from_before, replicas_apart) in result("interrupted_steps").items():
        check_raised(raised, *(("RuntimeError", "None") if "WithoutLoss" in case else ("ArithmeticError", "fourth")))
        assert from_before == replicas_apart == 0, case


# Optimizers


def test_post_step_hooks_come_after_the_weights_have_moved(result):
    for case, (largest, replicas_apart) in result("post_step_hooks").items():
        assert 0.019 < largest <= 0.0201, case
        assert replicas_apart == 0, case


def test_moments_that_are_zeroed_replaced_or_cleared_count(result):
    for case, (from_kept, replaced_from_zeroed, cleared_from_new, replicas_apart) in result("other_moments").items():
        assert from_kept > 1e-3, case
        assert replaced_from_zeroed == cleared_from_new == replicas_apart == 0, case


@pytest.mark.parametrize("method", ["dgc sgd", "onebit sgd", "onebit adamw"])
def test_another_optimizer_in_mid_run(result, method):
    """With one of the same class, whose learning rate is 0, nothing moves; another class is an error."""
    outcome = result("other_optimizers")[method]
    assert outcome["moved"] == 0
    check_raised(outcome["other"], "Refused", "another optimizer in mid-run with .*allowed: one of the same class")


def test_another_class_of_optimizer_where_error_feedback_stays_on_gradients(result):
    replicas_apart, moved = result("other_optimizers")["rmsprop"]
    assert replicas_apart == 0 < moved


def test_torchs_own_optimizer_in_automatic_optimization(result):
    for case, from_normal in result("torchs_own_optimizer").items():
        assert from_normal == [0, 0], case


def test_gradients_outside_the_optimizer_have_no_part(result):
    for case, (from_frozen, left) in result("optimizer_of_a_part").items():
        assert from_frozen == 0, case
        assert not left < 1e15, case


@pytest.mark.parametrize("wrap", ["Lookahead", "Duck"])
@pytest.mark.parametrize("method", ["onebit sgd", "powersgd adamw"])
def test_wrapped_optimizers(result, method, wrap):
    outcome = result("wrapped_optimizers")[f"{method} {wrap}"]
    assert outcome["replicas_apart"] == 0
    assert outcome["steps"] == 12
    assert outcome["remembers"]
    assert outcome["loss"] < 0.9


def test_a_wrapper_that_adds_nothing_changes_nothing(result):
    assert result("wrapped_optimizers")["as the optimizer itself"] == 0


def test_an_optimizer_that_is_made_beforehand_warms_up_from_the_start(result):
    for case, (calls, rates) in result("prebuilt_optimizers").items():
        assert calls == 1, case
        full = 0.01 if "adamw" in case else 0.05
        assert rates == pytest.approx([full * tenths / 10 for tenths in range(1, 7)]), case


# The module's weights, layers and buffers


@pytest.mark.parametrize("when", ["around", "without"])
def test_weights_that_the_module_writes_stay_written(result, when):
    """Outside of local weights, and where there are none."""
    for case, (from_unit, replicas_apart) in result("written_weights")[when].items():
        written_last = case.endswith(("optimizer_step", "on_train_batch_end"))
        assert from_unit < (1e-6 if written_last else 0.05), case  # else a step follows
        assert replicas_apart == 0, case


def test_writes_into_local_weights_are_errors(result):
    for raised in result("written_weights")["during"].values():
        check_raised(
            raised, "Refused", "local weights .*'head.weight'.*allowed: local_weights=False.*on_train_batch_end"
        )


def test_parameters_that_ddp_is_told_to_ignore_are_each_ranks_own(result):
    for case, (rest_apart, experts) in result("ignored_parameters").items():
        assert rest_apart == 0, case
        assert all(moved > 1e-3 and mean_moved < 2e-3 for moved, mean_moved in experts), case  # 0.01 between two ranks


def test_a_layer_frozen_on_one_rank_is_named(result):
    for raised in result("frozen_on_one_rank").values():
        check_raised(raised, "Refused", "'body.weight': got 'trains on rank 0, is frozen on rank 1'")


@pytest.mark.parametrize("compressor", ["DGC", "OneBit"])
def test_layers_made_in_setup_may_be_excluded(result, compressor):
    outcome = result("layers_made_in_setup")
    assert outcome[f"{compressor} head.*"] == [[["nothing", ""]] * 2, ["body.weight"]]
    check_raised(outcome[f"{compressor} tail.*"][0], "Refused", rf"{compressor}.exclude: got 'tail.\*'")


@pytest.mark.parametrize("method", ["dgc sgd", "onebit sgd", "onebit adamw"])
def test_buffers_of_each_ranks_data_are_no_difference_of_replicas(result, method):
    check_raised(result("buffers_of_data")[method], "nothing", "")


@pytest.mark.parametrize("when", ["inside", "late"])
def test_a_teacher_that_follows_local_weights_is_an_error(result, when):
    """In the first steps, or at the end of the fit if it changes only after the steps that are compared."""
    for raised in result("teachers")[when].values():
        check_raised(raised, "Refused", "'teacher.weight', which on rank 1 .*on_train_batch_end.*local_weights=False")


def test_a_teacher_that_follows_shared_weights_is_the_same_on_all_ranks(result):
    for case, replicas_apart in result("teachers")["outside"].items():
        assert replicas_apart == 0, case


def test_buffers_and_averages_are_the_same_whenever_they_are_read(result):
    for case, seen in result("validated_buffers").items():
        assert seen == [0, 0, 0], case


def test_fabric_leaves_out_steps_and_discards_gradients(result):
    for case, seen in result("fabric").items():
        assert seen == [0, 0, 0, 8], case
