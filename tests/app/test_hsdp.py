"""strategy=hsdp on the command line: a run of 2 x 2 ranks, one that resumes it on a mesh of 1 x 2, an evaluation."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_gradcomp.app import report, run_folder, sharding
from lightning_gradcomp.app.classifier import Classifier
from lightning_gradcomp.app.models import build
from lightning_gradcomp.app.train import build as parts_of
from lightning_gradcomp.app.trainer import strategy
from lightning_gradcomp.compressors import PowerSGD
from lightning_gradcomp.plugin.hsdp import CompressedHSDPStrategy
from tests.app.test_compose import run_of
from tests.app.test_parts import pretend_gpus
from tests.processes import start_world

SCRIPT = str(Path(__file__).with_name("train_script.py"))
RUN = (
    "recipe=digits_swin",
    "model=custom",
    f"model.target={__name__}:network",
    "strategy=hsdp",
    "trainer.limit_train_batches=2",
    "trainer.accelerator=cpu",
    "trainer.devices=auto",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
)


class Block(nn.Module):
    """A residual block."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU())

    def forward(self, x):
        return x + self.layers(x)


def network():
    """Images of 8x8 pixels -> logits."""
    return nn.Sequential(nn.Flatten(), Block(), Block(), nn.Linear(64, 10))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of the runs, and what rank 0 of each has printed."""
    folder = tmp_path_factory.mktemp("hsdp")

    def trained(name, world, *overrides):
        (folder / name).mkdir()
        run = run_of(*RUN, *overrides)
        run_folder.resolve_checkpoint(run, folder / name, sweep=False)
        run_folder.save(run, folder / name)
        ended = [
            rank.end()
            for rank in start_world(
                world,
                SCRIPT,
                str(folder / name),
            )
        ]
        assert [rank.returncode for rank in ended] == [0] * world, [rank.stdout for rank in ended]
        return ended[0].stdout

    said = {"first": trained("first", 4, "strategy.shard=2", "trainer.max_epochs=1", "trainer.compile=true")}
    said["rest"] = trained("rest", 2, f"ckpt={folder / 'first'}", "trainer.max_epochs=2")
    said["eval"] = trained("eval", 2, f"ckpt={folder / 'rest'}", "evaluate=true")
    said["sgd"] = trained("sgd", 2, "optimizer=sgd", "compressor=gradient_dropping", "trainer.max_epochs=1")
    return folder, said


def summary_of(runs, name):
    return json.loads((runs[0] / name / "summary.json").read_text())


def test_replicas_exchange_compressed_shards(runs):
    costs = summary_of(runs, "first")["communication"]
    assert (costs["world_size"], costs["shards"], costs["steps"]) == (2, 2, 2)
    assert 0 < costs["bytes_sent"] < costs["dense_bytes"] / 4
    assert "by each of 4 processes, between 2 replicas (all_gather)" in runs[1]["first"]
    page = report.write([runs[0] / "first"]).read_text()
    assert "- Ranks: N=2 replicas of 2 shards each" in page and "not logged" not in page


def test_blocks_are_compiled(runs):
    assert "compiled" in runs[1]["first"] and "compiled" not in runs[1]["rest"]


def test_another_mesh_resumes_its_folder(runs):
    folder, said = runs
    assert (folder / "first" / "checkpoints" / "last.ckpt" / ".metadata").exists()
    assert {path.name for path in (folder / "first" / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    assert summary_of(runs, "rest")["epochs"] == 2 and "nothing: there is one replica" in said["rest"]
    meta = torch.load(folder / "rest" / "checkpoints" / "last.ckpt" / "meta.pt")
    assert meta["global_step"] == 4


def test_sgd_trains_shards(runs):
    assert summary_of(runs, "sgd")["communication"]["steps"] == 2


def test_evaluate_validates_the_weights_of_a_folder(runs):
    result = json.loads((runs[0] / "eval" / "evaluation.json").read_text())
    assert result["val_acc"] == pytest.approx(summary_of(runs, "rest")["best_val_acc"])
    assert result["val_images"] == 360


def test_options_reach_the_strategy():
    words = ("strategy.replicate=3", "strategy.shard=4", "strategy.save_distributed_checkpoint=false")
    made = strategy(run_of("strategy=hsdp", *words, "strategy.timeout=90", "residual_device=cpu"))
    assert isinstance(made, CompressedHSDPStrategy)
    assert (made.replicate, made.shard, made.residual_device) == (3, 4, "cpu")
    assert made._timeout.seconds == 90 and not made._save_distributed_checkpoint


@pytest.mark.parametrize(
    ("name", "number", "kinds"),
    [
        ("swin_t", 15, {"SwinTransformerBlock", "PatchMerging"}),
        ("resnet18", 8, {"BasicBlock"}),
        ("resnet50", 16, {"Bottleneck"}),
    ],
)
def test_blocks_of_known_networks(name, number, kinds):
    found = list(sharding.blocks(build(name, channels=3, classes=10)))
    assert len(found) == number and {type(block).__name__ for block in found} == kinds


def test_a_network_without_blocks_is_one_unit():
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8)))
    assert not list(sharding.blocks(layers))


def test_a_mesh_that_does_not_fit_is_refused_before_a_process_starts(command, tmp_path):
    words = ("strategy=hsdp", "strategy.shard=3", "trainer.devices=4", "trainer.accelerator=cpu")
    code, trained = command(*words)
    assert "the mesh of 1 node with 4 ranks each: got 'replicate=1 x shard=3', allowed: a product of 4" in code
    assert not trained and not list(tmp_path.iterdir())
    assert command(*words[2:], "strategy=hsdp", "strategy.shard=2")[0] == 0


@pytest.mark.parametrize(("words", "ranks"), [((), 2), (("trainer.devices=4",), 4)])
def test_shards_of_ranks_that_share_a_gpu_are_refused(words, ranks, command, monkeypatch):
    pretend_gpus(monkeypatch, 1)
    code, trained = command("strategy=hsdp", *words)
    assert f"trainer.devices with strategy=hsdp: got {ranks}, allowed: up to 1, one for each GPU" in code
    assert not trained
    assert command("strategy=hsdp", "trainer.devices=1")[0] == 0


@pytest.mark.parametrize("shards", [2, 4])
def test_powersgd_is_refused_where_a_shard_is_too_small(tmp_path, shards):
    """Swin-T's last layer has 10 rows: 5 and 5, or 3, 3, 3 and 1."""
    words = ("recipe=swin_t_hsdp", "compressor=powersgd", f"strategy.shard={shards}", "trainer.accelerator=cpu")
    if shards == 2:
        assert parts_of(run_of(*words), tmp_path)
        return
    with pytest.raises(ValueError, match=r"PowerSGD\(rank=4\): got \"a shard of 'model.head.weight' with 1\""):
        parts_of(run_of(*words), tmp_path)


def test_a_scalar_parameter_is_refused():
    network = nn.Module()
    network.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"^the shape of parameter 'model.scale' with strategy=hsdp: got \(\)"):
        sharding.check(Classifier(network, None), PowerSGD(), 2)
