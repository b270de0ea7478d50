"""Features of the Trainer under compression. One run of `features.py` on two ranks serves most tests here."""

import re
from pathlib import Path

import pytest

from tests.processes import outcomes


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """What a feature came to, by its name in the script."""
    return outcomes(Path(__file__).with_name("features.py"), tmp_path_factory.mktemp("features"), timeout=300)


SUPPORTED = [
    "accumulation", "clipping_the_average", "manual_optimization", "manual_static_graph", "several_optimizers",
    "unused_parameters", "static_graph", "gradient_as_bucket_view", "freezing", "new_parameter_group", "tied_weights",
    "stochastic_weight_averaging", "ema_weight_averaging", "block_backward_sync",
    "two_backward_calls", "unfrozen_layers_unknown_to_ddp", "untoggled_optimizers", "one_backward_for_two_optimizers",
    "manual_clipping", "toggled_optimizers",
]  # fmt: skip


def found(outcome):
    """`outcome`, unless the version of Lightning has no such thing."""
    if outcome is None:
        pytest.skip("not in this version of Lightning")
    return outcome


def check_compressed(outcome):
    """The replicas are the same, something was learnt, by compression, with books in fp32."""
    assert outcome["replicas_apart"] == 0
    assert outcome["loss"] < 0.8  # the variance of what is to be learnt is 1
    assert outcome["ratio"] > 1.5
    assert outcome["remembered_in"] == ["torch.float32"]


@pytest.mark.parametrize("feature", SUPPORTED)
def test_supported(result, feature):
    outcome = found(result(feature))
    assert outcome["apart"] == 0  # from stock DDP
    check_compressed(outcome["compressed"])


@pytest.mark.parametrize("feature", ["clipping_the_average", "clipping_locally"])
def test_clipping_clips(result, feature):
    assert result(feature)["clipped_from_unclipped"] > 0.01


def test_the_trainers_clipping_is_dgcs_own(result):
    assert result("clipping_locally")["apart"] == 0
    assert result("clipping_locally")["gradient_clip_val_afterwards"] == 0.1


def test_clipping_in_dgcs_dense_phases_is_the_trainers(result):
    assert result("clipping_dense_phases") <= 1e-6


def test_clipping_at_zero_is_none(result):
    assert result("no_clipping") == 0


def test_a_parameter_that_no_rank_uses_stays(result):
    moved = {"body": True, "head": True, "on_rank_0": True, "nowhere": False}
    assert result("unused_parameters")["moved"] == [moved, moved]


@pytest.mark.parametrize("feature", ["stochastic_weight_averaging", "ema_weight_averaging"])
def test_weight_averaging_averages(result, feature):
    assert found(result(feature))["moved"] > 0.01


def test_nothing_is_left_of_the_tuners_search(result):
    outcome = result("tuner_lr_find")
    assert outcome["new_lr"]
    assert outcome["remembered"] == [True, 0]
    assert outcome["apart"] == 0


def test_nothing_is_left_of_a_search_in_the_fit(result):
    assert found(result("lr_finder_callback")) == {"steps": 20, "tried": 15, "apart": 0}


def test_fit_validate_test_and_again(result):
    outcome = result("fit_twice")
    assert outcome["apart"] <= 1e-6
    stock, same, sparse = outcome["losses"]
    assert same == pytest.approx(stock)
    assert sparse[0] == sparse[1] > sparse[2] == sparse[3]
    assert outcome["global_step"] == 20
    assert outcome["replicas_apart"] == 0


@pytest.mark.parametrize("how", ["torch.compile", "configure_model"])
def test_compiled_is_as_not_compiled(result, how):
    outcome = result("compiled")[how]
    assert outcome["apart"] == 0
    assert outcome["names"] == ["body.weight", "head.weight"]


def test_compiled_run_resumes_without_compilation(result):
    assert result("compiled")["torch.compile"]["resumed_apart"] == 0


def test_tied_weights_are_remembered_once(result):
    assert result("tied_weights")["names"] == ["back.weight", "body.weight", "head.weight"]


def test_an_optimizer_that_lightning_does_not_know_gets_averages(result):
    outcome = result("unknown_optimizer")
    assert outcome["onebit"] == [0, 20, 1, True]
    apart, steps, ratio, warned = outcome["int8"]
    assert 0 < apart < 0.01 and steps == 20 and ratio > 1.5 and not warned


def test_monitor_sees_the_users_momentum(result):
    outcome = result("momentum_in_the_monitor")
    assert outcome["sparsity"] == 0.9
    assert outcome["logged"] == [0.9] * 20


def test_monitor_counts_every_step_of_a_batch(result):
    counted = result("several_optimizers")["counted"]
    assert counted["steps"] == 40 and counted["unseen_bytes"] == 0 < counted["sent"]


def test_monitor_of_a_fit_with_nothing_to_do_has_the_totals_that_it_goes_on_from(result):
    summary, [_, before] = result("monitored")["finished"], result("monitored")["summaries"]
    assert summary["steps"] == summary["bytes_sent"] == 0
    assert summary["totals"]["bytes_sent"] == before["totals"]["bytes_sent"]


def test_monitors_totals_go_on_and_stand_beside_a_validation(result):
    (first, second), rows = result("monitored")["summaries"], result("monitored")["rows"]
    assert second["totals"]["bytes_sent"] == first["bytes_sent"] + second["bytes_sent"]
    assert second["totals"]["dense_bytes"] == first["dense_bytes"] + second["dense_bytes"]
    assert second["totals"]["seconds"] > first["totals"]["seconds"] > 0
    validations = [[row for row in run if "validated" in row] for run in rows]
    totals = [row["comm/total_bytes_sent"] for run in validations for row in run if "time/total_s" in row]
    assert totals == [run["totals"]["bytes_sent"] for run in (first, second)]
    assert len(validations[1]) == 2 and "comm/total_bytes_sent" not in validations[1][1]  # trainer.validate
    seconds = [row["time/total_s"] for run in rows for row in run if "time/total_s" in row]
    assert seconds == sorted(seconds) and len(seconds) == 12
    assert result("monitored")["saved"].keys() == {"bytes_sent", "dense_bytes", "seconds"}


def test_monitor_logs_the_residual_of_compressed_steps(result):
    steps = [row for run in result("monitored")["rows"] for row in run if "comm/sparsity" in row]
    assert [row["comm/sparsity"] for row in steps] == pytest.approx([0] * 5 + [0.9] * 5)
    assert [row.get("memory/residual_to_gradient", 0) > 0 for row in steps] == [False] * 5 + [True] * 5


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-true"])
def test_low_precision(result, precision):
    outcome = result("low_precision")[precision]
    check_compressed(outcome)
    kinds = {"bf16-mixed": "torch.float32", "bf16-true": "torch.bfloat16", "16-true": "torch.float16"}
    assert outcome["trained_in"] == kinds[precision]


def test_loss_scale(result):
    without_clipping, with_clipping = result("loss_scale")
    assert without_clipping == 0
    assert with_clipping <= 1e-5  # the norm is taken of scaled gradients; a last bit can be more of one in fp16


@pytest.mark.parametrize("strategy", ["dense", "dgc"])
def test_training_recovers_from_an_overflow_on_one_rank(result, strategy):
    outcome = result("overflow")[strategy]
    without, overflown = outcome["losses"]
    assert outcome["scale"] == 2**9  # half of what it was: one step was given up
    assert overflown == pytest.approx(without, rel=0.15)  # of 20 steps it had one less
    assert overflown != without
    assert outcome["finite"] == [True, True]


def check_raised(raised, kind, message):
    """Every rank has raised it."""
    assert [name for name, _ in raised] == [kind, kind]
    assert all(re.search(message, said) for _, said in raised), raised


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        ("sparse_gradients", r"gradients of 'table': got 'Embedding\(sparse=True\)', allowed: sparse=False"),
        ("added_layer", r"parameters that train: got .*'more.weight', which was added later"),
        ("frozen_while_training", r"frozen while training: got 'body.weight', allowed: find_unused_parameters=True"),
        ("uneven_batches", r"training batches an epoch: got 'rank 0: 4, rank 1: 6'"),
    ],
)
def test_refused_on_every_rank(result, feature, message):
    check_raised(result(feature), "Refused", message)


def test_unfrozen_layers_with_topology_auto(result):
    assert result("unfrozen_layers_unknown_to_ddp")["auto"] == [0, 0]


@pytest.mark.parametrize("compressor", ["OneBit", "PowerSGD"])
def test_discarded_gradients_stay_discarded(result, compressor):
    head, body = result("discarded_gradients")[compressor]
    assert head == 0 < body


def test_averages_that_no_step_uses(result):
    outcome = result("skipped_steps")
    assert outcome["replicas_apart"] == 0
    check_raised(outcome["not_zeroing"], "Refused", r"backward calls with OneBit between two .* got .*no_sync")


def test_manual_clipping(result):
    assert result("manual_clipping")["moved"] > 0.01
    check_raised(result("manual_clipping")["dgc"], "Refused", r"clipping with DGC in manual .*DGC\(clip_norm=")


def test_two_gradients_a_step_train_dense_only(result):
    outcome = result("two_gradients_a_step")
    check_raised(outcome["onebit"], "Refused", r"gradients in one step of TwoGradients with OneBit: got .*ddp_dense")
    assert outcome["apart"] == 0


def test_ddps_own_words_about_unused_parameters_are_kept(result):
    check_raised(result("unused_parameter"), "RuntimeError", r"find_unused_parameters")


@pytest.mark.parametrize("optimization", ["automatic", "manual"])
def test_a_disturbed_replica_is_named(result, optimization):
    message = r"step 5: parameter 'head.weight' on rank 1 .*1 of 4 parameters"
    check_raised(result("disturbed_replica")[optimization], "ReplicasDiffer", message)


@pytest.mark.parametrize(
    ("module", "hook"),
    [
        ("Logging", "Logging.on_before_optimizer_step"),
        ("loss scale", "Logging.on_before_optimizer_step"),
        ("Clipping", "Clipping.on_after_backward"),
        ("Guarding", "Guarding.on_before_optimizer_step"),
        ("ClippingInStep", "ClippingInStep.optimizer_step"),
        ("TorchsOptimizer", "TorchsOptimizer.optimizer_step"),
        ("Skipping", "Skipping.optimizer_step"),
        ("callback", "LambdaCallback.on_before_optimizer_step"),
    ],
)
def test_hooks_that_find_update_directions_are_told(result, module, hook):
    first, *rest = result("hooks_on_directions")[module]
    times = re.match(rf"{hook}: .* p.grad holds update directions .* about ([\d.]+) times .*gradient_clip_val", first)
    assert times and float(times[1]) > 0
    if module in ("Logging", "loss scale", "callback", "TorchsOptimizer"):
        assert not rest
    else:
        what = "were discarded" if module in ("Guarding", "Skipping") else r"norm of \S+ in p.grad, and of 0.1 when"
        [second] = rest
        assert re.match(rf"{hook}: .*{what}", second)


def test_manual_clipping_of_update_directions_is_told(result):
    [said] = result("hooks_on_directions")["ClippingByHand"]
    assert re.match(
        r"ClippingByHand.training_step: .* norm of \S+ in p.grad, and of 0.1 when .*gradient_clip_val", said
    )


@pytest.mark.parametrize("module", ["WarmingUp", "Adam", "ByHand", "lightning's", "gradients"])
def test_other_modules_are_told_nothing(result, module):
    assert result("hooks_on_directions")[module] == []


def test_a_callback_may_change_the_clipping_in_training(result):
    outcome = result("changed_clipping")
    assert outcome["compressed"] == outcome["off"] == 0
    assert outcome["dense"] <= 1e-6
    assert outcome["read"] == [10.0, 0.1, 0.1, 0.1]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("by value", r"Trainer\(gradient_clip_algorithm\) with DGC: got 'value', allowed: norm"),
        ("both", r"DGC.clip_norm and Trainer\(gradient_clip_val\): got 'both', allowed: one of"),
        ("by itself", r"clipping with DGC by another threshold .*: got 'self.clip_gradients', allowed: DGC\(clip_norm"),
    ],
)
def test_clipping_that_cannot_be_applied_locally_is_refused_in_training(result, how, message):
    check_raised(result("changed_clipping")[how], "Refused", message)


def test_torchs_own_optimizer(result):
    """It steps averages that are there after backward. Several optimizers' steps would have to average."""
    outcome = result("torchs_own_optimizer")
    assert outcome["apart"] == 0
    message = r"optimizer in manual optimization: got .*AdamW.*, allowed: one from self.optimizers"
    check_raised(outcome["several"], "Refused", message)


@pytest.mark.parametrize("compressor", ["dgc", "onebit"])
def test_norms_after_manual_backward_are_those_of_the_average(result, compressor):
    outcome = result("guarded")[compressor]
    [(norms, steps), other] = outcome["ranks"]
    assert [norms, steps] == other
    assert norms.count("nan") == 1 and steps == 9
    assert outcome["replicas_apart"] == 0


@pytest.mark.parametrize("compressor", ["dgc", "onebit"])
def test_manual_accumulation_is_the_same_with_and_without_no_sync(result, compressor):
    outcome = result("manual_accumulation")
    assert outcome[compressor] == 0
    assert outcome["discards"] == []


@pytest.mark.parametrize(
    ("make", "got"),
    [
        ("SkipsOnOneRank", "rank 0: step 6; rank 1: step 5"),
        (
            "SkipsOneOfSeveral",
            "rank 0: step 10, optimizer 0, backward pass 6; rank 1: step 10, optimizer 1, backward pass 6",
        ),
    ],
)
def test_a_step_skipped_on_one_rank_is_named(result, make, got):
    check_raised(result("skipped_on_one_rank")[make], "Refused", rf"{got}', allowed: .* skipped an optimizer step")
