"""CompressedHSDPStrategy: four processes as meshes of several shapes."""

import warnings
from functools import cache
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from features_kit import QUIET, RANK
from features_kit import apart as apart_of
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import ModelParallelStrategy
from strategies import forced
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard

import lightning_gradcomp as lgc
from lightning_gradcomp.app.muon import MuonAdamW
from lightning_gradcomp.averaging.fsdp.checkpoint import whole_memory
from lightning_gradcomp.averaging.fsdp.shards import local
from lightning_gradcomp.plugin import hsdp as hsdp_module
from lightning_gradcomp.plugin.hsdp import _replaced
from lightning_gradcomp.plugin.rank_states import mean_over_ranks
from tests.averaging.workers import HAS_MUON
from tests.processes import on_ranks


class FSDPsOwn(ModelParallelStrategy):
    """HSDP as FSDP2 has it: both dimensions of the mesh are its own."""

    distributed_sampler_kwargs = lgc.CompressedHSDPStrategy.distributed_sampler_kwargs


class Net(L.LightningModule):
    """A small classifier, whose layers are sharded under strategies that have a mesh."""

    def __init__(self, adamw=False, wrapped=None):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 33), nn.LayerNorm(33), nn.Tanh(), nn.Linear(33, 4))
        self.adamw, self.wrapped = adamw, wrapped

    def configure_model(self):
        if self.device_mesh is None or isinstance(self.net, FSDPModule):
            return
        if self.wrapped == "checkpointed":
            apply_activation_checkpointing(self.net, check_fn=lambda module: isinstance(module, nn.Linear))
        if self.wrapped == "compiled":
            self.net[0] = torch.compile(self.net[0], backend="eager")
        own = isinstance(self.trainer.strategy, FSDPsOwn)
        fully_shard(self.net, mesh=self.device_mesh if own else self.device_mesh["shard"])

    def training_step(self, batch, index):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images).float(), labels)

    def validation_step(self, batch, index):
        self.log("loss", self.training_step(batch, index), sync_dist=True)

    def configure_optimizers(self):
        if self.adamw:
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Several(Net):
    """Two optimizers by hand, each with its own backward pass and clipping, as in a GAN."""

    def __init__(self, adamw=False, wrapped=None):
        super().__init__(adamw, wrapped)
        self.automatic_optimization = False

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()

    def configure_optimizers(self):
        first = torch.optim.AdamW(self.net[:3].parameters(), lr=0.01)
        return first, torch.optim.SGD(self.net[3].parameters(), lr=0.05, momentum=0.9)


class WithMuon(Net):
    def configure_optimizers(self):
        matrix, *rest = self.parameters()
        return MuonAdamW([{"params": [matrix], "rule": "muon"}, {"params": rest, "rule": "adamw"}], lr=0.01)


def data(batch=8):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(192, 16, generator=generator)
    labels = (images.mean(1) * 8 + 2).long().clamp(0, 3)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch)


def fit(strategy, *, kind=Net, adamw=False, wrapped=None, epochs=1, ckpt_path=None, seed=0, **options):
    L.seed_everything(seed, verbose=False)
    net = kind(adamw, wrapped)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=4, max_epochs=epochs, **QUIET, **options)
    trainer.fit(net, data(), ckpt_path=ckpt_path)
    return trainer, weights(net)


def weights(net):
    with torch.no_grad():
        parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
        return torch.cat([part.detach().float().reshape(-1) for part in parts])


def hsdp(compressor=None, replicate=2, shard=2, **options):
    return lgc.CompressedHSDPStrategy(compressor or dgc(), replicate, shard, **options)


def whole(replicate, shard):
    """Checkpoints are files of whole tensors."""
    return hsdp(None, replicate, shard, save_distributed_checkpoint=False)


def dgc():
    return lgc.DGC(sparsity=0.9, warmup_epochs=0, dense_epochs=0, min_elements=40)


def onebit():
    return lgc.OneBit(warmup_epochs=0, min_elements=40)


def replicas_apart(trainer):
    """The largest difference between replicas, over all shards."""
    group, largest = trainer.strategy.averager.ranks.group, torch.zeros(())
    for parameter in trainer.lightning_module.parameters():
        own = local(parameter).detach()
        if own.numel():
            first = own.clone()
            dist.broadcast(first, group=group, group_src=0)
            largest = torch.maximum(largest, (own - first).abs().max().float())
    return apart_of(largest, torch.zeros(()))


def remembered(trainer):
    """Kind -> name -> mean over replicas, in the parameters' shapes."""
    averager = trainer.strategy.averager
    memory = mean_over_ranks(averager.state_dict(), averager)["memory"]
    return whole_memory(averager, memory) if averager.shards else memory


def check_same_memory(memory, expected):
    assert memory.keys() == expected.keys()
    for kind, parts in memory.items():
        assert parts.keys() == expected[kind].keys()
        assert all(float((part - expected[kind][name]).abs().max()) <= 1e-6 for name, part in parts.items())


@cache
def one_epoch(adamw=False):
    """A run on the 2x2 mesh, and its weights, for several tests."""
    return fit(hsdp(), adamw=adamw)


LIKE_FSDP = {
    "sgd, clipped": {"gradient_clip_val": 0.1},
    "adamw, accumulated": {"adamw": True, "accumulate_grad_batches": 3},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "several optimizers": {"kind": Several},
}


@pytest.mark.parametrize("how", LIKE_FSDP)
@on_ranks(4)
def test_without_compression_it_is_fsdps_own_hsdp(how):
    _, ours = fit(hsdp("none"), **LIKE_FSDP[how])
    _, theirs = fit(FSDPsOwn(2, 2), **LIKE_FSDP[how])
    assert apart_of(ours, theirs) <= 1e-6


TRAINED = {
    "dgc": {"gradient_clip_val": 1.0},
    "adamw": {"adamw": True, "accumulate_grad_batches": 2},
    "bf16-true adamw": {"precision": "bf16-true", "adamw": True},
}


@pytest.mark.parametrize("how", TRAINED)
@on_ranks(4)
def test_replicas_stay_equal_in_compressed_steps(how):
    """With other initial weights on each rank."""
    strategy, monitor = hsdp(verify_replicas_every_n_steps=4), lgc.CommunicationMonitor()
    logging_norms = LambdaCallback(on_before_optimizer_step=lambda *args: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, after = fit(strategy, seed=RANK, callbacks=[monitor, logging_norms], **TRAINED[how])
    assert replicas_apart(trainer) == 0 and after.isfinite().all()
    dtype = torch.bfloat16 if "bf16" in how else torch.float32
    assert next(trainer.lightning_module.parameters()).dtype == dtype
    memory = strategy.averager.state_dict()["memory"]
    assert {part.dtype for parts in memory.values() for part in parts.values()} == {torch.float32}
    if RANK == 0:
        summary = monitor.summary()
        assert summary["steps"] == (3 if how == "adamw" else 6)
        assert 0 < summary["bytes_sent"] < summary["dense_bytes"]
        [told] = [str(each.message) for each in caught if "update direction" in str(each.message)]
        assert told.startswith("LambdaCallback.on_before_optimizer_step: ")


@on_ranks(4)
def test_several_optimizers_train_and_resume(tmp_path):
    path = tmp_path / "several"
    first, _ = fit(hsdp(onebit()), kind=Several)
    first.save_checkpoint(path)
    _, straight = fit(hsdp(onebit()), kind=Several, epochs=2)
    trainer, resumed = fit(hsdp(onebit()), kind=Several, epochs=2, ckpt_path=path)
    spent = trainer.strategy.averager.spent
    assert replicas_apart(trainer) == apart_of(straight, resumed) == 0
    assert spent.dense_bytes > 2 * spent.bytes_sent


@pytest.mark.parametrize("how", ["compiled", "checkpointed"])
@on_ranks(4)
def test_a_wrapped_module_trains_as_without(how):
    plain, expected = one_epoch()
    trainer, after = fit(hsdp(), wrapped=how)
    assert apart_of(after, expected) <= 1e-6
    one, other = (each.strategy.averager.state_dict()["memory"]["velocity"] for each in (plain, trainer))
    assert one.keys() == other.keys()


# Checkpoints


@pytest.mark.parametrize("adamw", [False, True])
@on_ranks(4)
def test_a_resumed_run_goes_on_as_the_whole_one(adamw, tmp_path):
    one_epoch(adamw)[0].save_checkpoint(tmp_path / "2x2")
    _, straight = fit(hsdp(), adamw=adamw, epochs=2)
    _, resumed = fit(hsdp(), adamw=adamw, epochs=2, ckpt_path=tmp_path / "2x2")
    assert apart_of(straight, resumed) == 0


@pytest.mark.parametrize("adamw", [False, True])
@on_ranks(4)
def test_checkpoints_load_on_other_meshes(adamw, tmp_path):
    """Each mesh resumes from what the previous one has saved."""
    first, here = one_epoch(adamw)
    steps, memory, path = first.global_step, remembered(first), tmp_path / "2x2"
    assert any(bool(part.any()) for part in memory["unsent_step" if adamw else "velocity"].values())
    first.save_checkpoint(path)
    strategies = {"1x4": hsdp(None, 1, 4), "4x1": whole(4, 1), "ddp": forced(dgc()), "2x2 again": whole(2, 2)}
    if not adamw:
        strategies = {"1x4": whole(1, 4), "ddp": forced(dgc())}
    for mesh, strategy in strategies.items():
        trainer, now = fit(strategy, adamw=adamw, ckpt_path=path, seed=1, max_steps=steps)
        assert apart_of(now, here) == 0, mesh
        found = remembered(trainer)
        if RANK == 0:
            check_same_memory(found, memory)
        path = tmp_path / f"{mesh}.ckpt"
        trainer.save_checkpoint(path)


@on_ranks(4)
def test_a_checkpoint_stays_until_the_next_one_is_whole(tmp_path):
    (trainer, _), path = one_epoch(), tmp_path / "step=1.ckpt"
    trainer.save_checkpoint(path)
    failing = mock.patch.object(hsdp_module, "save_sharded_state", lambda averager, folder: folder / 1)
    with failing, pytest.raises(TypeError):
        trainer.save_checkpoint(path)
    assert RANK or (path / hsdp_module.KEY / "state.json").exists()
    trainer.save_checkpoint(path)
    assert RANK or [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.skipif(not HAS_MUON, reason="torch 2.8 lacks Muon")
@on_ranks(4)
def test_muon_orthogonalizes_whole_matrices(tmp_path):
    """As of a model that is not sharded; compressed and resumed, too."""
    with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):  # it orthogonalizes in fp32
        _, sharded = fit(hsdp("none"), kind=WithMuon)
        _, entire = fit(lgc.CompressedDDPStrategy("none"), kind=WithMuon)
    assert apart_of(sharded, entire) <= 1e-5
    dropping = lgc.GradientDropping(sparsity=0.9, min_elements=40)
    trainer, _ = fit(hsdp(dropping), kind=WithMuon)
    trainer.save_checkpoint(tmp_path / "muon")
    _, straight = fit(hsdp(dropping), kind=WithMuon, epochs=2)
    _, resumed = fit(hsdp(dropping), kind=WithMuon, epochs=2, ckpt_path=tmp_path / "muon")
    assert replicas_apart(trainer) == apart_of(straight, resumed) == 0


@on_ranks(4)
def test_fit_validate_and_fit_again(tmp_path):
    """The validation is of a checkpoint of the weights alone."""
    trainer, here = fit(hsdp())
    net, path = trainer.lightning_module, tmp_path / "weights"
    trainer.save_checkpoint(path, weights_only=True)
    own, saved = (trainer.validate(net, data(), ckpt_path=which, verbose=False)[0]["loss"] for which in (None, path))
    assert own == saved and apart_of(weights(net), here) == 0
    trainer.fit_loop.max_epochs = 2
    trainer.fit(net, data())
    assert trainer.global_step == 12 and replicas_apart(trainer) == 0


# What is refused


class Refused(Net):
    """Whatever `shard` does instead of what it should."""

    def __init__(self, shard):
        super().__init__()
        self.shard = shard

    def configure_model(self):
        self.net = self.shard(self.net, self.device_mesh)


UNFIT = {
    "not sharded": (
        lambda net, mesh: net, r"configure_model\(\) with CompressedHSDPStrategy: got 'a model that is not sharded'",
    ),
    "both dimensions": (
        lambda net, mesh: fully_shard(net, mesh=mesh), r"got \"R, S\(0\) over \('replicate', 'shard'\)\"",
    ),
    "fsdp1": (
        lambda net, mesh: FullyShardedDataParallel(net, device_id=torch.device("cpu")),
        r"model: got 'FullyShardedDataParallel \(FSDP1\)'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
@on_ranks(4)
def test_models_that_are_not_sharded_so_are_refused(case):
    shard, message = UNFIT[case]
    trainer = L.Trainer(strategy=hsdp(), accelerator="cpu", devices=4, max_epochs=1, **QUIET)
    with pytest.raises(ValueError, match=message):
        trainer.fit(Refused(shard), data())


class Unsharded(Net):
    def configure_model(self):
        pass


class WithoutConfigureModel(Net):
    configure_model = L.LightningModule.configure_model


@pytest.mark.parametrize(
    ("mesh", "make", "options", "message"),
    [
        ({"shard": 3}, Unsharded, {}, "mesh of 1 node with 4 ranks each: got 'replicate=1 x shard=3', allowed: .* 4"),
        ({"replicate": 3, "shard": 2}, Unsharded, {}, "got 'replicate=3 x shard=2'"),
        ({}, WithoutConfigureModel, {}, "got 'no configure_model"),
        ({}, Unsharded, {"sync_batchnorm": True}, "sync_batchnorm with CompressedHSDPStrategy: got True, allowed: F"),
    ],
    ids=["3 shards", "3 x 2", "no configure_model", "sync_batchnorm"],
)
def test_what_can_not_be_honoured_is_refused_before_the_launch(mesh, make, options, message):
    strategy = lgc.CompressedHSDPStrategy("dgc", **mesh)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=4, max_epochs=1, **QUIET, **options)
    with pytest.raises(ValueError, match=message):
        trainer.fit(make(), data())


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
