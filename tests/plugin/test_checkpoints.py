"""Runs that stop and go on, on two and three ranks."""

import logging
import os
import time
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import cache
from importlib.metadata import version
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from features_kit import QUIET, RANK, WORLD, apart, on_every_rank, spread, weights
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from packaging.version import Version
from strategies import forced

import lightning_gradcomp as lgc
from lightning_gradcomp.averaging import mean_state
from lightning_gradcomp.plugin import rank_states
from lightning_gradcomp.plugin.checkpoint_files import Sidecars
from lightning_gradcomp.plugin.rank_states import KEY, RankStates
from tests.averaging.workers import Table, averaged, prescribed_loss, train
from tests.processes import on_ranks
from tests.threads import checked_collectives, run_ranks

BATCHES = 8
MOMENTS = {(0, "end"): "epoch end", (1, 2): "mid-epoch", (1, 4): "mid-accumulation"}
"""After which batch of which epoch a checkpoint is saved. Three batches are a step; the last is the second of three."""
QUICK = {"min_elements": 32, "warmup_epochs": 0, "dense_epochs": 0, "sparsity": 0.9}


GROWS = ((0.0, 1.0, 2.0, 3.0, 4.0, 5.0), (0.0, 1.0, 2.0, 4.0, 3.0, 5.0))
"""A metric of each rank's own. The two best before the last step are the same, and the second of them is not."""


class Net(L.LightningModule):
    """Its data depend on rank, epoch and batch alone, so a resumed run sees the batches that are left."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.ReLU(), torch.nn.Linear(40, 12))

    def training_step(self, _, index):
        generator = torch.Generator().manual_seed(1000 * self.current_epoch + 10 * index + self.global_rank)
        images = torch.randn(4, 12, generator=generator)
        loss = (self.layers(images) - images.flip(1)).square().mean()
        self.log("grows", GROWS[dist.get_rank() % 2][min(self.global_step, 5)])
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Watch(L.Callback):
    """Calls `save(trainer, moment)` at every moment, and notes what is there when training starts."""

    def __init__(self, save):
        self.save = save

    def on_train_start(self, trainer, *_):
        self.memory = trainer.strategy.averager.state_dict()["memory"]
        state, named = trainer.optimizers[0].state, trainer.lightning_module.named_parameters()
        self.momentum = {name: state[p]["momentum_buffer"].clone() for name, p in named if p in state}

    def on_train_batch_end(self, trainer, *args):
        self._at(trainer, args[-1])

    def on_train_epoch_end(self, trainer, *_):
        self._at(trainer, "end")

    def _at(self, trainer, batch):
        moment = MOMENTS.get((trainer.current_epoch, batch))
        if self.save and moment:
            self.save(trainer, moment)


class Slow(TorchCheckpointIO):
    """Checkpoints that stand only when training has gone on for a while."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        time.sleep(0.2)
        super().save_checkpoint(checkpoint, path, storage_options)


def quick(cls, **options):
    known = {field.name for field in fields(cls)}
    return cls(**{key: value for key, value in QUICK.items() if key in known}, **options)


def fit(compressor, state="gather", ckpt=None, save=None, callbacks=(), nodes=1, plugins=None, **options):
    """Train two epochs from seed 0; returns (trainer, all weights in one vector, the Watch)."""
    L.seed_everything(0, verbose=False)
    net, watch = Net(), Watch(save)
    trainer = L.Trainer(
        strategy=forced(compressor=compressor, checkpoint_state=state, **options), accelerator="cpu",
        devices=WORLD // nodes, num_nodes=nodes, max_epochs=2, accumulate_grad_batches=3,
        use_distributed_sampler=False, callbacks=[watch, *callbacks], plugins=plugins,
        **{**QUIET, "enable_checkpointing": bool(callbacks)},
    )  # fmt: skip
    trainer.fit(net, torch.utils.data.DataLoader(range(BATCHES)), ckpt_path=ckpt)
    return trainer, weights(net), watch


DGC, ONEBIT, FED_BACK = quick(lgc.DGC), quick(lgc.OneBit), quick(lgc.TernGrad, error_feedback=True)
WAYS = {
    **{f"dgc-{state}": (DGC, {"state": state}) for state in ("gather", "sidecar", "mean", "drop", "auto")},
    "none-gather": ("none", {}),
    "onebit-gather": (ONEBIT, {}),
    "powersgd-gather": (quick(lgc.PowerSGD), {}),
    "two_phase-gather": (DGC, {"topology": "two_phase"}),
    "terngrad-sidecar": (FED_BACK, {"state": "sidecar"}),
    "async-gather": (DGC, {"plugins": [AsyncCheckpointIO(Slow())]}),
    "url-sidecar": (DGC, {"state": "sidecar"}),
    "limit-auto": (DGC, {"state": "auto"}),  # more than one file may hold
    "limit-gather": (DGC, {}),
    "nodes-auto": (DGC, {"state": "auto", "nodes": 2}),
    "nothing-auto": ("none", {"state": "auto", "nodes": 2}),
}
"""What compresses, and options of `fit`."""


@contextmanager
def surroundings(way):
    """What a way needs besides options."""
    with ExitStack() as stack:
        if "limit" in way:
            stack.enter_context(mock.patch.object(rank_states, "GATHER_LIMIT", 1))
        if way in ("nodes-auto", "nothing-auto"):
            stack.enter_context(mock.patch.dict(os.environ, LOCAL_RANK="0"))
        yield


@cache
def straight(way, folder):
    """The weights of an uninterrupted run that saves at all moments. Rank 0 alone is told where to save."""
    compressor, options = WAYS[way]
    told = f"{'file://' * ('url' in way)}{folder}/{way}" if RANK == 0 else folder / "nowhere"
    with surroundings(way):
        return fit(
            compressor, save=lambda trainer, moment: trainer.save_checkpoint(f"{told}/{moment}.ckpt"), **options
        )[1]


def off(way, folder, moment="mid-accumulation"):
    """How far a run resumed from a moment is from the uninterrupted one; by default from where most is held."""
    expected = straight(way, folder)
    compressor, options = WAYS[way]
    path = f"{'file://' * ('url' in way)}{folder}/{way}/{moment}.ckpt"
    with surroundings(way):
        return apart(expected, fit(compressor, ckpt=path, **{**options, "plugins": None})[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize("moment", MOMENTS.values())
@pytest.mark.parametrize("way", ["dgc-gather", "dgc-sidecar"])
@on_ranks(2)
def test_a_run_that_goes_on_is_the_straight_run_to_the_bit(way, moment, folder):
    assert off(way, folder, moment) == 0


NOT_IN_2_5 = "AsyncCheckpointIO writes what training has changed meanwhile"
async_io = pytest.mark.skipif(Version(version("lightning")) < Version("2.6"), reason=NOT_IN_2_5)
SHARDS_AND_DRAWS = ["two_phase-gather", "terngrad-sidecar"]
OTHERS = ["none-gather", "onebit-gather", "powersgd-gather", *SHARDS_AND_DRAWS]
OTHERS += ["url-sidecar", "limit-auto", "nodes-auto", "dgc-auto"]


@pytest.mark.parametrize("way", [*OTHERS, pytest.param("async-gather", marks=async_io)])
@on_ranks(2)
def test_so_it_is_from_mid_accumulation_in_other_ways(way, folder):
    assert off(way, folder) == 0


@pytest.mark.parametrize("way", ["dgc-gather", *SHARDS_AND_DRAWS])
@on_ranks(3)
def test_so_it_is_on_three_ranks(way, tmp_path):
    assert off(way, tmp_path) == 0


@pytest.mark.parametrize("way", ["dgc-mean", "dgc-drop"])
@on_ranks(2)
def test_without_what_each_rank_remembers_it_is_not(way, folder):
    assert off(way, folder) > 1e-3


# What is in the files


IN_FILES = {
    "dgc-gather": "ranks", "dgc-sidecar": "sidecars", "dgc-mean": "mean", "dgc-auto": "ranks", "limit-auto": "sidecars",
    "limit-gather": "ranks", "nodes-auto": "sidecars",
}  # fmt: skip


@pytest.fixture(scope="module")
def two(folder):
    """The folder, with what two ranks save in these ways."""
    save_all(folder=folder)
    return folder


@on_ranks(2)
def save_all(folder):
    for way in (*IN_FILES, "dgc-drop", "nothing-auto"):
        straight(way, folder)


def load(folder, way, moment):
    return torch.load(folder / way / f"{moment}.ckpt", weights_only=True)


@pytest.mark.parametrize(("way", "has"), IN_FILES.items())
def test_what_is_in_the_file(two, way, has):
    for moment in MOMENTS.values():
        saved = load(two, way, moment)[KEY]
        assert set(saved) == {"format", "compressor", "world_size", has}
        assert (saved["format"], saved["compressor"], saved["world_size"]) == (1, "dgc", 2)
        state = saved[has]
        if has == "sidecars":
            files = {path.name: torch.load(path, weights_only=True) for path in (two / way / state).iterdir()}
            assert set(files) == {"rank-0.ckpt", "rank-1.ckpt"}
            state = [files[f"rank-{rank}.ckpt"]["state"] for rank in range(2)]
        for part in [state] if has == "mean" else state:
            assert ("accumulated" in part["memory"]) == (moment == "mid-accumulation")
            assert part["memory"]["velocity"]["layers.0.weight"].any()


def test_nodes_that_remember_nothing_write_no_sidecars_and_what_is_dropped_is_in_no_file(two):
    assert load(two, "nothing-auto", "mid-epoch")[KEY]["ranks"][1]["memory"] == {}
    assert all(KEY not in load(two, "dgc-drop", moment) for moment in MOMENTS.values())


@pytest.mark.parametrize(("state", "ranks"), [("gather", 2), ("mean", 2), ("sidecar", 1), ("drop", 1)])
def test_plain_ddp_finds_the_mean_momentum_or_rank_0s(two, state, ranks):
    held = [part["memory"]["momentum"] for part in load(two, "dgc-gather", "mid-epoch")[KEY]["ranks"]]
    assert not torch.equal(held[0]["layers.0.weight"], held[1]["layers.0.weight"])
    [optimizer] = load(two, f"dgc-{state}", "mid-epoch")["optimizer_states"]
    for index, name in {0: "layers.0.weight", 2: "layers.2.weight"}.items():
        mean = torch.stack([part[name] for part in held[:ranks]]).mean(0)
        torch.testing.assert_close(optimizer["state"][index]["momentum_buffer"], mean, rtol=1e-6, atol=1e-7)


def test_mean_state_in_mid_accumulation(two):
    mean, ranks = (load(two, f"dgc-{state}", "mid-accumulation")[KEY] for state in ("mean", "gather"))
    expected = mean_state(ranks["ranks"])["memory"]
    assert set(expected) == {"momentum", "velocity", "accumulated"}
    torch.testing.assert_close(mean["mean"]["memory"], expected, rtol=1e-6, atol=1e-7)


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


class Edit(L.Callback):
    """Removes one parameter's momentum from the checkpoint, and halves the bits of another's."""

    def on_save_checkpoint(self, trainer, module, checkpoint):
        state = checkpoint["optimizer_states"][0]["state"]
        state[0]["momentum_buffer"] = state[0]["momentum_buffer"].half()
        del state[2]


@on_ranks(2)
def test_a_hooks_edit_of_the_momentum_is_saved(tmp_path):
    nothing = ModelCheckpoint(tmp_path / "nothing", save_top_k=0)
    fit(DGC, callbacks=[Edit(), nothing])[0].save_checkpoint(tmp_path / "edited.ckpt")
    [saved] = torch.load(tmp_path / "edited.ckpt", weights_only=True)["optimizer_states"]
    dtypes = {index: each["momentum_buffer"].dtype for index, each in saved["state"].items()}
    assert dtypes == {0: torch.float16, 1: torch.float32, 3: torch.float32}


# Other numbers of ranks, other compressors


@contextmanager
def told():
    """Inside, a list of what Lightning's log says on this rank."""
    said, logger, handler = [], logging.getLogger("lightning.pytorch"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield said
    logger.setLevel(level)
    logger.removeHandler(handler)


def begins(folder, compressor, state, source):
    """A run resumed from a checkpoint of two ranks: the Watch, the mean of the states, and what rank 0 says."""
    expected = mean_state(load(folder, "dgc-gather", "mid-epoch")[KEY]["ranks"])["memory"]
    with told() as said:
        _, after, watch = fit(compressor, state, folder / f"dgc-{source}" / "mid-epoch.ckpt")
    assert spread(after) == 0
    return watch, expected, on_every_rank(said)[0]


def distance(memory, expected, world=1):
    """The largest difference between what ranks hold and what was expected; summed over `world` ranks, its mean's."""
    largest = 0.0
    for kind, parts in expected.items():
        for name, part in parts.items():
            own = memory[kind][name].clone()
            if world > 1:
                dist.all_reduce(own)
            largest = max(largest, apart(own / world, part))
    return largest


@pytest.mark.parametrize("state", ["gather", "sidecar", "mean"])
@on_ranks(3)
def test_three_ranks_start_with_the_mean_of_two(state, two):
    watch, expected, said = begins(two, DGC, state, state)
    assert distance(watch.memory, expected) == 0
    assert said.count("3 ranks start with the mean of the checkpoint's 2 states.") == 1


@on_ranks(2)
def test_two_ranks_start_with_their_own_state_or_a_mean(two):
    watch, expected, said = begins(two, DGC, "mean", "mean")
    assert distance(watch.memory, expected) <= 1e-7
    assert said.count("2 ranks start with the mean of the checkpoint's 2 states.") == 1
    watch, expected, said = begins(two, DGC, "gather", "gather")
    assert distance(watch.memory, expected) > 1e-3
    assert distance(watch.memory, expected, WORLD) <= 1e-7
    assert not any("the mean of" in line for line in said)


def keeps_the_momentum_alone(two, compressor, state, reason):
    watch, expected, said = begins(two, compressor, state, "gather")
    assert not any(watch.memory.get(kind) for kind in ("velocity", "residual"))
    assert distance({"momentum": watch.momentum}, {"momentum": expected["momentum"]}) == 0
    [line] = [line for line in said if "starts with empty residuals" in line]
    assert reason in line


@pytest.mark.parametrize(
    ("compressor", "state", "reason"),
    [(ONEBIT, "gather", "residuals of 'dgc': onebit starts"), (DGC, "drop", "='drop': dgc starts")],
    ids=["onebit", "drop"],
)
@on_ranks(2)
def test_another_compressor_keeps_the_momentum_alone(compressor, state, reason, two):
    keeps_the_momentum_alone(two, compressor, state, reason)


@on_ranks(3)
def test_another_compressor_keeps_the_momentum_alone_on_three_ranks(two):
    keeps_the_momentum_alone(two, ONEBIT, "gather", "residuals of 'dgc': onebit starts")


# Callbacks and launchers


@on_ranks(2)
def test_sidecars_follow_save_top_k_and_links(tmp_path):
    """Of six checkpoints the last is the best and two are kept; "last.ckpt" is a link to it."""
    options = {"monitor": "grows", "mode": "max", "save_top_k": 2, "save_last": "link", "every_n_train_steps": 1}
    whole = fit(DGC, "sidecar", callbacks=[ModelCheckpoint(tmp_path, "{step}", **options)])[1]
    on_every_rank(None)  # rank 0 has removed what goes
    link, *kept = sorted(os.listdir(tmp_path))
    names, sidecars = kept[::2], kept[1::2]
    assert (link, names) == ("last.ckpt", ["step=5.ckpt", "step=6.ckpt"])
    assert all(folder.startswith(f"{name}.ranks-") for name, folder in zip(names, sidecars, strict=True))
    assert apart(whole, fit(DGC, "sidecar", tmp_path / "last.ckpt")[1]) == 0


@on_ranks(2)
def test_sidecars_of_an_earlier_save_are_removed_on_every_disk(tmp_path):
    """Two saves of one name, on a disk of each rank's own."""
    disk, trainer, before = tmp_path / f"{RANK}", fit(DGC, "sidecar")[0], os.getcwd()
    disk.mkdir()
    os.chdir(disk)
    trainer.save_checkpoint("old.ckpt")
    trainer.strategy.remove_checkpoint("old.ckpt")
    for _ in range(2):
        trainer.save_checkpoint("last.ckpt")
    os.chdir(before)
    (checkpoint, sidecars), other = on_every_rank(sorted(os.listdir(disk)))
    assert checkpoint == "last.ckpt" and sidecars.startswith("last.ckpt.ranks-")
    assert other == [sidecars]


@on_ranks(1)
def test_the_main_process_after_a_spawned_fit(tmp_path):
    """What it saves are the weights that it got back. Forked ranks need not import everything again."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]
    with mock.patch(f"{__name__}.WORLD", 2):
        trainer, after, _ = fit(DGC, start_method="fork", callbacks=[ModelCheckpoint(tmp_path / "spawned")])
    trainer.save_checkpoint(tmp_path / "spawned.ckpt")
    saved = torch.load(tmp_path / "spawned.ckpt", weights_only=True)
    assert torch.equal(torch.cat([part.reshape(-1) for part in saved["state_dict"].values()]), after)
    assert {path.name for path in tmp_path.iterdir()} == {"spawned", "spawned.ckpt"}
