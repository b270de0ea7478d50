"""What Lightning trainings on two ranks come to. One run of `scenarios.py` serves all tests here."""

import json
from pathlib import Path

import pytest

from tests.processes import run_world
from tests.threads import ALL_GATHER


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    script = str(Path(__file__).with_name("scenarios.py"))
    output = run_world(2, script, str(tmp_path_factory.mktemp("checkpoints")), timeout=150)
    return json.loads(output.splitlines()[-1])


def test_ddp_dense_and_dgc_that_drops_nothing_are_ddp(outcome):
    dense, nothing_dropped = outcome["dense_limit"]
    assert dense == 0
    assert nothing_dropped <= 1e-6


def test_optimizer_groups_are_the_users_around_batches(outcome):
    assert outcome["sparse_training"]["groups_seen"] == [[[0.9, 0.01, 4], [0.8, 0, 2]]]


def test_replicas_are_bitwise_equal_though_gradients_are_at_local_weights(outcome):
    assert outcome["sparse_training"]["replicas_apart"] == 0
    assert outcome["sparse_training"]["at_local_weights"] > 10


def test_monitor_logs_bytes_ratio_sparsity_and_phases(outcome):
    logged, summary = outcome["sparse_training"]["logged"], outcome["sparse_training"]["summary"]
    assert logged["comm/sparsity"] == pytest.approx(0.9)
    assert logged["comm/bytes_sent"] == logged["comm/bytes_received"] > 0
    assert logged["comm/ratio_N2"] == pytest.approx(4 * 2970 / logged["comm/bytes_sent"], rel=0.1)
    assert all(logged[f"time/{phase}_ms"] > 0 for phase in ("compute", "compress", "exchange", "decompress"))
    assert logged["sent_MB"] == pytest.approx(logged["comm/bytes_sent"] / 1e6)
    assert summary["steps"] == 15 and summary["world_size"] == 2 and summary["topology"] == "all_gather"
    assert summary["dense_bytes"] > summary["bytes_sent"] > 0


def test_the_trials_decision_is_kept_in_the_checkpoint(outcome):
    tried = outcome["tried"]
    decided = {
        "all_gather": "Steps are compressed (all_gather) from now on",
        "all_reduce": "Steps are dense from now on",
    }
    assert tried["auto"].startswith(decided[tried["topology"]])
    assert tried["auto_of_the_resumed"] == tried["auto"]
    assert tried["replicas_apart"] == 0


def test_sparsity_follows_the_callback_by_epoch_and_by_step(outcome):
    by_epoch, by_step = outcome["warm_up"][:30], outcome["warm_up"][30:]
    assert by_epoch == [0] * 10 + [0.8] * 10 + [0.9] * 10
    assert by_step == [0] * 5 + [0.95] * 5


def test_ranks_that_hold_the_same_weights_are_not_sent_them(outcome):
    assert outcome["initial_weights"]["sent"] == [False, True]
    assert outcome["initial_weights"]["apart"] == 0


def test_a_checkpoint_gathers_and_averages_nothing_besides(outcome):
    assert outcome["saved"]["besides_gathering"] == {"all_reduce": 1, "barrier": 1}  # ranks meet, before and after


def test_checkpoint_is_also_one_of_plain_ddp(outcome):
    saved = outcome["saved"]
    assert saved["exported_momentum_apart"] <= 1e-7
    assert saved["buffers_in_checkpoint"] == 6
    assert saved["momentum_in_checkpoint"] == 0.9
    assert saved["steps_under_ddp"] == 30
    assert not saved["state_in_weights_only"]


def test_plain_ddp_checkpoint_continues(outcome):
    assert outcome["plain_to_sparse"]["dense_apart"] <= 1e-6
    assert outcome["plain_to_sparse"]["sparsity"] == pytest.approx(0.9)


def test_a_compressed_step_is_one_round_trip(outcome):
    assert outcome["round_trips"]["calls"] == {ALL_GATHER: 8}


def test_batch_norms_are_rank_0s_when_somebody_looks_at_them(outcome):
    assert outcome["round_trips"]["apart_in_training"][0] > 0
    assert outcome["round_trips"]["apart_at_the_end"] == 0


def test_batch_norms_stay_a_ranks_own_if_asked(outcome):
    assert outcome["round_trips"]["own_apart_at_the_end"] > 0
