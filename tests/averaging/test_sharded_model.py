"""`GradientAverager` with FSDP2: two replicas of two shards. One run of `sharded_model_script.py` serves all tests."""

import json
from pathlib import Path

import pytest

from tests.averaging.laws import REGISTERED, REMEMBERING, with_defaults
from tests.processes import run_world


@pytest.fixture(scope="module")
def outcome():
    output = run_world(4, str(Path(__file__).with_name("sharded_model_script.py")), timeout=150)
    return json.loads(output.splitlines()[-1])


def test_without_compression_it_is_fsdps_own_hsdp(outcome):
    for how, apart in outcome["like_fsdp"].items():
        assert apart <= 1e-6, how


def test_nothing_is_lost_on_any_shard(outcome):
    assert set(outcome["conserved"]) == set(with_defaults(REMEMBERING))
    for name, (apart, _, remembers) in outcome["conserved"].items():
        assert apart <= 1e-5, name
        assert remembers, name


def test_replicas_are_equal_to_the_bit(outcome):
    assert {apart for _, apart, _ in outcome["conserved"].values()} == {0}


def test_a_shard_is_averaged_as_a_plain_tensor_is(outcome):
    assert len(outcome["as_plain"]) == 2 * len(with_defaults(REGISTERED))
    for name, (apart, states_are_the_same) in outcome["as_plain"].items():
        # The draws of few bits depend on a shard's place in the whole model.
        most = next((most for method, most in {"int8": 0.1, "eden": 1.0}.items() if name.startswith(method)), None)
        assert apart == 0 if most is None else 0 < apart < most, (name, apart)
        assert states_are_the_same, name


def test_what_is_not_finite_on_one_rank_is_seen_on_all(outcome):
    assert outcome["not_finite"] == [True] * 4


def test_local_clipping_knows_the_norm_over_all_shards(outcome):
    assert outcome["clipped"]


def test_the_optimizer_has_its_momentum_in_all_phases(outcome):
    held, apart = outcome["phases"]
    assert held == ["DTensor"] * 7
    assert apart == 0


def test_a_rank_sends_what_the_formula_says_of_its_shards(outcome):
    sent, expected, dense = outcome["sent_bytes"]
    assert sent == expected < dense / 4


REFUSED = {
    "frozen": "a rank whose shards are all empty",
    "powersgd": "a shard of 'matrix' with 6",
    "topology": "got 'two_phase', allowed: 'all_gather'",
    "inside": "got 'dense', allowed: 'compressed'",
    "both dimensions": "got \"R, S(0) over ('replicate', 'shard')\"",
    "half": "'1.weight': got 'a tensor that is not sharded",
    "world": "got 'ranks that hold other shards of the same replica'",
    "no group": "got None, allowed: that of the replicate dimension",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_shards_can_not_do_is_refused(outcome, case):
    assert REFUSED[case] in outcome["refused"][case]
