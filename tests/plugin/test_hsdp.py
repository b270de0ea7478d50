"""CompressedHSDPStrategy: 4 processes as meshes of several shapes. One run of hsdp_script.py serves most tests."""

import json
from pathlib import Path

import lightning as L
import pytest
import torch

import lightning_gradcomp as lgc
from lightning_gradcomp.plugin.hsdp import _replaced
from tests.averaging.workers import HAS_MUON
from tests.processes import run_world


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    script = str(Path(__file__).with_name("hsdp_script.py"))
    return json.loads(run_world(4, script, str(tmp_path_factory.mktemp("hsdp")), timeout=150).splitlines()[-1])


@pytest.mark.parametrize("how", ["sgd, clipped", "adamw, accumulated", "bf16-mixed", "bf16-true", "several optimizers"])
def test_without_compression_it_is_fsdps_own_hsdp(outcome, how):
    assert outcome["like_fsdp"][how] <= 1e-6


@pytest.mark.parametrize("how", ["dgc", "adamw", "bf16-true", "bf16-true adamw"])
def test_replicas_stay_equal_in_compressed_steps(outcome, how):
    seen = outcome["trained"][how]
    assert seen["replicas_apart"] == 0
    assert seen["finite"]
    assert seen["parameters"] == ("torch.bfloat16" if "bf16-true" in how else "torch.float32")
    assert seen["memory"] == ["torch.float32"]
    assert seen["summary"]["steps"] == (3 if how == "adamw" else 6)
    assert 0 < seen["summary"]["bytes_sent"] < seen["summary"]["dense_bytes"]
    [told] = seen["told"]
    assert told.startswith("LambdaCallback.on_before_optimizer_step: ") and "update directions" in told


def test_several_optimizers_train_and_resume(outcome):
    seen = outcome["several"]
    assert seen["replicas_apart"] == seen["resumed"] == 0
    assert seen["ratio"] > 2


@pytest.mark.parametrize("how", ["compiled", "checkpointed"])
def test_a_wrapped_module_trains_as_without(outcome, how):
    apart, same_names = outcome["wrapped"][how]
    assert apart <= 1e-6
    assert same_names


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_resumed_run_goes_on_as_the_whole_one(outcome, optimizer):
    assert outcome[optimizer]["resumed"] == 0


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_checkpoint_stays_until_the_next_one_is_whole(outcome, optimizer):
    assert outcome[optimizer]["saving fails"] == [True, ["2x2"]]


WAYS = {
    "sgd": ["2x2 to 1x4", "1x4 to ddp"],
    "adamw": ["2x2 to 1x4", "1x4 to 4x1", "4x1 to ddp", "ddp to 2x2"],
}


@pytest.mark.parametrize(("optimizer", "way"), [(optimizer, way) for optimizer in WAYS for way in WAYS[optimizer]])
def test_checkpoints_load_on_other_meshes(outcome, optimizer, way):
    assert outcome[optimizer]["remembers"]
    weights_apart, remembered_apart = outcome[optimizer][way]
    assert weights_apart == 0
    assert remembered_apart <= 1e-6


@pytest.mark.skipif(not HAS_MUON, reason="torch 2.8 lacks Muon")
def test_muon_orthogonalizes_whole_matrices(outcome):
    assert outcome["muon"]["like_whole"] <= 1e-5
    assert outcome["muon"]["replicas_apart"] == outcome["muon"]["resumed"] == 0


def test_fit_validate_and_fit_again(outcome):
    seen = outcome["evaluated"]
    assert seen["losses"][0] == seen["losses"][1]
    assert seen["kept"] == 0
    assert seen["steps"] == 12
    assert seen["replicas_apart"] == 0


REFUSED = {
    "not sharded": "configure_model() with CompressedHSDPStrategy: got 'a model that is not sharded'",
    "both dimensions": "got \"R, S(0) over ('replicate', 'shard')\"",
    "fsdp1": "model: got 'FullyShardedDataParallel (FSDP1)'",
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_are_not_sharded_so_are_refused(outcome, case):
    assert REFUSED[case] in outcome["refused"][case]


class Net(L.LightningModule):
    def __init__(self, optimizers=1):
        super().__init__()
        self.layer, self.optimizers_made = torch.nn.Linear(2, 2), optimizers

    def configure_model(self):
        pass

    def training_step(self, batch, index):
        pass

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(self.optimizers_made)]


class WithoutConfigureModel(Net):
    configure_model = L.LightningModule.configure_model


@pytest.mark.parametrize(
    ("mesh", "net", "options", "message"),
    [
        ({"shard": 3}, Net(), {}, "the mesh of 1 node with 4 ranks each: got 'replicate=1 x shard=3', allowed: .* 4"),
        ({"replicate": 3, "shard": 2}, Net(), {}, "got 'replicate=3 x shard=2'"),
        ({}, WithoutConfigureModel(), {}, "got 'no configure_model"),
        ({}, Net(), {"sync_batchnorm": True}, "sync_batchnorm with CompressedHSDPStrategy: got True, allowed: False"),
    ],
    ids=["3 shards", "3 x 2", "no configure_model", "sync_batchnorm"],
)
def test_what_can_not_be_honoured_is_refused_before_the_launch(mesh, net, options, message):
    strategy = lgc.CompressedHSDPStrategy("dgc", **mesh)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=4, logger=False, max_epochs=1, **options)
    with pytest.raises(ValueError, match=message):
        trainer.fit(net, torch.utils.data.DataLoader(torch.zeros(8, 2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard": 0}, "CompressedHSDPStrategy.shard: got 0, allowed: 'auto', or a whole number from 1"),
        ({"replicate": "all"}, "CompressedHSDPStrategy.replicate: got 'all'"),
        ({"verify_replicas_every_n_steps": 0}, "verify_replicas_every_n_steps: got 0"),
        ({"compressor": "lzma"}, "got 'lzma', allowed: .*powersgd"),
    ],
    ids=str,
)
def test_options_that_can_not_be_honoured_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        lgc.CompressedHSDPStrategy(**options)


def test_a_link_in_a_checkpoints_place_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    (tmp_path / "step=1.ckpt").mkdir()
    link = tmp_path / "last.ckpt"
    link.symlink_to("step=1.ckpt")
    for name in ("first", "second"):
        with _replaced(link, lambda: None) as part:
            part.mkdir()
            (part / name).touch()
        assert [path.name for path in link.iterdir()] == [name] and not link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "step=1.ckpt"]
