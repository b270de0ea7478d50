"""Runs that stop and go on, on two and three ranks. One run of `checkpoints.py` for each world serves all tests."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from packaging.version import Version

from lightning_gradcomp.averaging import mean_state
from lightning_gradcomp.plugin.checkpoint_files import Sidecars
from lightning_gradcomp.plugin.rank_states import KEY, RankStates
from tests.averaging.workers import Table, averaged, prescribed_loss, train
from tests.processes import Forked, run_world
from tests.threads import checked_collectives, run_ranks

SCRIPT = str(Path(__file__).with_name("checkpoints.py"))
MOMENTS = ["epoch end", "mid-epoch", "mid-accumulation"]
FULLEST = {"mid-accumulation": 0}
"""How far the run is from the straight one that goes on from the moment at which the most is held."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


def outcome(world, folder):
    return json.loads(run_world(world, SCRIPT, str(folder), timeout=200).splitlines()[-1])


@pytest.fixture(scope="module")
def two(folder):
    return outcome(2, folder)


@pytest.fixture(scope="module")
def three(two, folder):
    """Goes on from checkpoints of `two`, too."""
    return outcome(3, folder)


@pytest.fixture(params=["two", "three"])
def either(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("way", ["dgc gather", "dgc sidecar"])
def test_a_run_that_goes_on_is_the_straight_run_to_the_bit(two, way):
    assert two["exact"][way] == dict.fromkeys(MOMENTS, 0)


SHARDS_AND_DRAWS = ["dgc two_phase", "terngrad sidecar"]


@pytest.mark.parametrize("way", ["none gather", "onebit gather", "powersgd gather", *SHARDS_AND_DRAWS])
def test_so_it_is_from_mid_accumulation_with_others(two, way):
    assert two["exact"][way] == FULLEST


@pytest.mark.parametrize("way", ["dgc gather", *SHARDS_AND_DRAWS])
def test_so_it_is_on_three_ranks(three, way):
    assert three["exact_on_three"][way] == FULLEST


@pytest.mark.parametrize("way", ["async", "url", "limit", "nodes", "auto"])
def test_other_ways_to_write_resume_exactly(two, way):
    if way == "async" and Version(version("lightning")) < Version("2.6"):
        pytest.skip("AsyncCheckpointIO writes what training has changed meanwhile")
    assert two["other_ways"][way] == FULLEST


@pytest.mark.parametrize("state", ["mean", "drop"])
def test_without_what_each_rank_remembers_it_is_not(two, state):
    assert all(apart > 1e-3 for apart in two["other_ways"][state].values())


@pytest.mark.parametrize(
    ("way", "has"),
    [
        ("dgc-gather", "ranks"),
        ("dgc-sidecar", "sidecars"),
        ("dgc-mean", "mean"),
        ("dgc-auto", "ranks"),
        ("limit-auto", "sidecars"),
        ("limit-gather", "ranks"),
        ("nodes-auto", "sidecars"),
    ],
)
def test_what_is_in_the_file(two, folder, way, has):
    for moment in MOMENTS:
        saved = torch.load(folder / f"2-{way}" / f"{moment}.ckpt", weights_only=True)[KEY]
        assert set(saved) == {"format", "compressor", "world_size", has}
        assert (saved["format"], saved["compressor"], saved["world_size"]) == (1, "dgc", 2)
        state = saved[has]
        if has == "sidecars":
            files = {path.name: torch.load(path, weights_only=True) for path in (folder / f"2-{way}" / state).iterdir()}
            assert set(files) == {"rank-0.ckpt", "rank-1.ckpt"}
            state = [files[f"rank-{rank}.ckpt"]["state"] for rank in range(2)]
        for part in [state] if has == "mean" else state:
            assert ("accumulated" in part["memory"]) == (moment == "mid-accumulation")
            assert part["memory"]["velocity"]["layers.0.weight"].any()


def test_nodes_that_remember_nothing_write_no_sidecars(two, folder):
    assert torch.load(folder / "2-nothing-auto" / "mid-epoch.ckpt", weights_only=True)[KEY]["ranks"][1]["memory"] == {}


def test_nothing_is_in_the_file_when_it_is_dropped(two, folder):
    for moment in MOMENTS:
        assert KEY not in torch.load(folder / "2-dgc-drop" / f"{moment}.ckpt", weights_only=True)


@pytest.mark.parametrize(("state", "ranks"), [("gather", 2), ("mean", 2), ("sidecar", 1), ("drop", 1)])
def test_plain_ddp_finds_the_mean_momentum_or_rank_0s(two, folder, state, ranks):
    saved = {
        way: torch.load(folder / f"2-dgc-{way}" / "mid-epoch.ckpt", weights_only=True) for way in ("gather", state)
    }
    held = [part["memory"]["momentum"] for part in saved["gather"][KEY]["ranks"]]
    assert not torch.equal(held[0]["layers.0.weight"], held[1]["layers.0.weight"])
    [optimizer] = saved[state]["optimizer_states"]
    for index, name in {0: "layers.0.weight", 2: "layers.2.weight"}.items():
        mean = torch.stack([part[name] for part in held[:ranks]]).mean(0)
        torch.testing.assert_close(optimizer["state"][index]["momentum_buffer"], mean, rtol=1e-6, atol=1e-7)


def test_mean_state_in_mid_accumulation(two, folder):
    mean, ranks = (
        torch.load(folder / f"2-dgc-{state}" / "mid-accumulation.ckpt", weights_only=True)[KEY]
        for state in ("mean", "gather")
    )
    expected = mean_state(ranks["ranks"])["memory"]
    assert set(expected) == set(mean["mean"]["memory"]) == {"momentum", "velocity", "accumulated"}
    for kind, parts in expected.items():
        assert set(parts) == set(mean["mean"]["memory"][kind])
        for name, part in parts.items():
            torch.testing.assert_close(mean["mean"]["memory"][kind][name], part, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("world", [2, 3])
def test_partition_residuals_are_added_up_the_rest_averaged(world):
    def work(rank, group):
        model, checkpoint = Table(), {}
        optimizer, averager = averaged(model, group, topology="two_phase")
        train(model, optimizer, averager, rank, 4, prescribed_loss)
        RankStates("mean", Sidecars(TorchCheckpointIO()), 1).put_into(checkpoint, "last.ckpt", averager, False)
        return averager.state_dict(), checkpoint[KEY]["mean"]

    states, means = zip(*run_ranks(world, work), strict=True)
    expected = mean_state(states)
    assert expected["workers"] == 1
    for mean in means:
        assert mean["workers"] == 1
        assert set(mean["memory"]) == {"momentum", "velocity", "partition_residual"} == set(expected["memory"])
        for kind, parts in expected["memory"].items():
            for name, part in parts.items():
                torch.testing.assert_close(mean["memory"][kind][name], part, rtol=1e-5, atol=1e-6)


def test_in_the_mean_a_rank_without_a_gradient_counts_as_0():
    def work(rank, group):
        model, checkpoint = Table(), {}
        _, averager = averaged(model, group)
        prescribed_loss(model, rank, 0).backward()
        if rank == 1:
            model.matrix.grad = model.bias.grad = None
        RankStates("mean", Sidecars(TorchCheckpointIO()), 1).put_into(checkpoint, "last.ckpt", averager, True)
        return averager.gradients.local(), checkpoint[KEY]["mean"]["memory"]["accumulated"]

    with checked_collectives(2):
        (first, mean), (second, same) = run_ranks(2, work)
    assert list(second) == ["kernel", "small"]
    for name, gradient in first.items():
        assert torch.equal(mean[name], (gradient + second.get(name, 0)) / 2)
        assert torch.equal(mean[name], same[name])


def test_a_hooks_edit_of_the_momentum_is_saved(two):
    assert two["edited"] == {"0": "torch.float16", "1": "torch.float32", "3": "torch.float32"}


# Other numbers of ranks, other compressors


@pytest.mark.parametrize("way", ["DGC gather", "DGC sidecar", "DGC mean"])
def test_three_ranks_start_with_the_mean_of_two(three, way):
    got = three["from_two_ranks"][way]
    assert got["memory"]["each"] == 0
    assert got["memory"]["mean"] <= 1e-7
    assert got["replicas"] == 0
    assert got["said"].count("3 ranks start with the mean of the checkpoint's 2 states.") == 1


def test_two_ranks_start_with_their_own_state_or_a_mean(two):
    mean, own = two["from_two_ranks"]["DGC mean"], two["from_two_ranks"]["DGC gather"]
    assert mean["memory"]["each"] <= 1e-7 < 1e-3 < own["memory"]["each"]
    assert own["memory"]["mean"] <= 1e-7
    assert mean["said"].count("2 ranks start with the mean of the checkpoint's 2 states.") == 1
    assert not any("the mean of" in line for line in own["said"])


@pytest.mark.parametrize(
    ("way", "reason", "name"), [("OneBit gather", "residuals of 'dgc'", "onebit"), ("DGC drop", "='drop'", "dgc")]
)
def test_another_compressor_keeps_the_momentum_alone(either, way, reason, name):
    got = either["from_two_ranks"][way]
    assert got["memory"] is None
    assert got["momentum"]["each"] == 0
    [line] = [line for line in got["said"] if "starts with empty residuals" in line]
    assert reason in line and f": {name} starts" in line


# Callbacks and launchers


def test_sidecars_follow_save_top_k_and_links(two):
    link, *kept = two["best"]["left"]
    names, sidecars = kept[::2], kept[1::2]
    assert (link, names) == ("last.ckpt", ["step=5.ckpt", "step=6.ckpt"])
    assert all(folder.startswith(f"{name}.ranks-") for name, folder in zip(names, sidecars, strict=True))
    assert two["best"]["apart"] == 0


def test_sidecars_of_an_earlier_save_are_removed_on_every_disk(two):
    checkpoint, sidecars = two["own_disks"][0]
    assert checkpoint == "last.ckpt" and sidecars.startswith("last.ckpt.ranks-")
    assert two["own_disks"][1] == [sidecars]


def test_the_main_process_after_a_spawned_fit(tmp_path):
    done = Forked(SCRIPT, str(tmp_path), timeout=90).end()
    assert done.returncode == 0, done.stdout
    outcome = json.loads(done.stdout.splitlines()[-1])["spawned"]
    assert outcome["off"] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"spawned", "spawned.ckpt"}
