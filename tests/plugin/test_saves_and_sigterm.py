"""Saves that not every rank makes alike, and SIGTERM on one rank. One run of the script serves all tests."""

import json
from pathlib import Path

import pytest
import torch

from lightning_gradcomp.plugin.delayed import KEY as DELAYED
from lightning_gradcomp.plugin.rank_states import KEY
from tests.processes import run_world

SCRIPT = str(Path(__file__).with_name("saves_and_sigterm.py"))
STRATEGIES = ("dgc", "dga", "sparseloco")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saves")


@pytest.fixture(scope="module")
def outcome(folder):
    return json.loads(run_world(2, SCRIPT, str(folder), timeout=100).splitlines()[-1])


def load(folder, name):
    return torch.load(folder / f"{name}.ckpt", weights_only=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", ["everyone", "dump", "resumed", "0 drops", "1 drops"])
def test_the_fit_goes_on(outcome, strategy, how):
    for rank in outcome["saves"][f"{strategy} {how}"]:
        assert (rank["error"], rank["steps"], rank["ended"]) == (None, 6, True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_save_on_some_ranks_alone_is_an_error_on_all(outcome, strategy):
    for rank in outcome["saves"][f"{strategy} alone"]:
        assert "trainer.save_checkpoint: got 'a call on only some ranks', allowed: a call on every" in rank["error"]
        assert rank["seconds"] < 30  # a third of the timeout


def test_what_rank_0_saves_by_itself_has_its_own_momentum(outcome, folder):
    whole, own = load(folder, "dgc-everyone"), load(folder, "dgc-dump")
    for name, weight in whole["state_dict"].items():
        assert torch.equal(own["state_dict"][name], weight)
    momentum = own["optimizer_states"][0]["state"][0]["momentum_buffer"]
    held = [rank["memory"]["momentum"]["layer.weight"] for rank in whole[KEY]["ranks"]]
    assert KEY not in own
    assert torch.equal(momentum, held[0]) and not torch.equal(momentum, held[1])


def test_a_save_that_waits_or_misses_something_says_so(outcome):
    rank_0, rank_1 = outcome["waits"]["dgc"]
    assert rank_0["error"] is None
    [said] = rank_0["said"]
    assert "trainer.save_checkpoint waits for other ranks" in said and not rank_1["said"]
    [warning] = outcome["saves"]["dgc dump"][0]["said"]
    assert "lacks their residuals" in warning


@pytest.mark.parametrize(("strategy", "key"), zip(STRATEGIES, (KEY, DELAYED, DELAYED), strict=True))
def test_rank_0_decides_whether_states_are_saved(outcome, folder, strategy, key):
    assert not {key, "optimizer_states"} & set(load(folder, f"{strategy}-drops-0"))
    whole = load(folder, f"{strategy}-drops-1")
    assert set(whole) == set(load(folder, f"{strategy}-everyone")) and key in whole
    states = whole[key] if strategy == "dgc" else whole[key].get(KEY, {})
    assert len(states.get("ranks", ())) == (0 if strategy == "dga" else 2)


@pytest.mark.parametrize("strategy", ["none", "dgc", "dga"])
@pytest.mark.parametrize("place", ["step", "validation"])
def test_sigterm_at_the_end_is_what_it_is_under_ddp(outcome, strategy, place):
    ranks = [rank for case in (strategy, "ddp") for rank in outcome["signals"][f"{case} {place}"]]
    for rank in ranks:
        assert (rank["error"], rank["steps"], rank["ended"]) == ("SIGTERMException: ", 6, False)


@pytest.mark.parametrize(("strategy", "key"), [("none", KEY), ("dgc", KEY), ("dga", DELAYED)])
def test_sigterm_on_one_rank_ends_all_together_with_a_whole_checkpoint(outcome, folder, strategy, key):
    first, second = outcome["signals"][f"{strategy} early"]
    assert first["error"] == second["error"] == "SIGTERMException: "
    assert 1 <= first["steps"] == second["steps"] <= 3  # of 6
    assert not first["ended"] and not second["ended"]
    saved = load(folder, f"{strategy}-terminated")
    assert key in saved and saved["global_step"] == first["steps"]


def test_a_save_after_an_error_on_every_rank_waits_for_rank_0(outcome):
    for rank in outcome["errors"]["dgc"]:
        assert rank["error"] == "ArithmeticError: on every rank" and rank["there"]
        assert rank["seconds"] < 30
