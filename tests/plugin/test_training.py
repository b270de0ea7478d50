"""What Lightning trainings on two ranks come to."""

from collections import Counter
from contextlib import ExitStack, contextmanager
from unittest import mock

import lightning as L
import pytest
import torch
from features_kit import QUIET, RANK, WORLD, apart, spread, weights
from strategies import forced
from torch import nn
from torch.nn.parallel import distributed

import lightning_gradcomp as lgc
from tests.processes import on_ranks
from tests.threads import ALL_GATHER


class Net(L.LightningModule):
    """A small classifier with batch norm, two parameter groups, SGD with momentum and a OneCycle schedule."""

    def __init__(self, nesterov: bool = False) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8 * 36, 10)
        self.nesterov = nesterov
        self.seen: set[tuple] = set()
        self.at_local_weights = 0

    def training_step(self, batch, index):
        self.at_local_weights += not torch.equal(self.head.weight, self.shared)
        images, labels = batch
        loss = nn.functional.cross_entropy(self.head(self.features(images)), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        groups = [
            {"params": self.features.parameters(), "weight_decay": 1e-2},
            {"params": self.head.parameters(), "momentum": 0.8, "lr": 0.02},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=self.nesterov)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=60, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _look(self):
        groups = self.trainer.optimizers[0].param_groups
        self.seen.add(tuple((group["momentum"], group["weight_decay"], len(group["params"])) for group in groups))

    def on_train_batch_start(self, *args):
        self._look()
        self.shared = self.head.weight.detach().clone()

    def on_train_batch_end(self, *args):
        self._look()


def data() -> torch.utils.data.DataLoader:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(320, 1, 8, 8, generator=generator)
    labels = (images.mean((1, 2, 3)) * 30 + 5).long().clamp(0, 9)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), 16)


def fit(strategy, *, epochs=3, ckpt_path=None, nesterov=False, seed=0, **options):
    """Train from a seed; returns (trainer, all weights as one vector)."""
    L.seed_everything(seed, verbose=False)
    net = Net(nesterov)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=WORLD, max_epochs=epochs, **QUIET, **options)
    trainer.fit(net, data(), ckpt_path=ckpt_path)
    return trainer, weights(net)


def sparse(**options):
    return forced(compressor=lgc.DGC(sparsity=0.9, warmup_epochs=1, min_elements=32, **options))


@contextmanager
def counted_collectives():
    """Inside, calls of torch.distributed's collectives are counted by name."""
    calls, names = Counter(), {"broadcast", "all_reduce", "all_gather_single", "all_gather_into_tensor", "barrier"}
    names.add("_broadcast_coalesced")  # of DDP, for buffers

    def counting(name, collective):
        def call(*args, **kwargs):
            calls[name] += 1
            return collective(*args, **kwargs)

        return call

    with ExitStack() as patches:
        for name in names & set(dir(torch.distributed)):
            counted = counting(name, getattr(torch.distributed, name))
            patches.enter_context(mock.patch.object(torch.distributed, name, counted))
        yield calls


class Keep(L.Callback):
    """Keeps what was logged in the last step."""

    def on_train_batch_end(self, trainer, *args):
        self.logged = {**trainer.logged_metrics, **trainer.progress_bar_metrics}


@on_ranks(2)
def test_ddp_dense_and_dgc_that_drops_nothing_are_ddp():
    _, stock = fit("ddp", nesterov=True)
    assert apart(stock, fit("ddp_dense", nesterov=True)[1]) == 0
    assert apart(stock, fit(forced(compressor=lgc.DGC(sparsity=0)), nesterov=True)[1]) <= 1e-6


@on_ranks(2)
def test_replicas_are_bitwise_equal_and_the_monitor_logs_what_was_sent():
    """Though gradients are taken at local weights. The optimizer's groups are the user's around batches."""
    monitor, keep = lgc.CommunicationMonitor(), Keep()
    trainer, after = fit(sparse(), accumulate_grad_batches=2, log_every_n_steps=1, callbacks=[monitor, keep])
    assert spread(after) == 0
    assert trainer.lightning_module.at_local_weights > 10
    assert trainer.lightning_module.seen == {((0.9, 0.01, 4), (0.8, 0, 2))}
    if RANK:
        return
    logged, summary = {key: float(value) for key, value in keep.logged.items()}, monitor.summary()
    assert logged["comm/sparsity"] == pytest.approx(0.9)
    assert logged["comm/bytes_sent"] == logged["comm/bytes_received"] > 0
    assert logged["comm/ratio_N2"] == pytest.approx(4 * 2970 / logged["comm/bytes_sent"], rel=0.1)
    assert all(logged[f"time/{phase}_ms"] > 0 for phase in ("compute", "compress", "exchange", "decompress"))
    assert logged["sent_MB"] == pytest.approx(logged["comm/bytes_sent"] / 1e6)
    assert summary["steps"] == 15 and summary["world_size"] == 2 and summary["topology"] == "all_gather"
    assert summary["dense_bytes"] > summary["bytes_sent"] > 0


@on_ranks(2)
def test_the_trials_decision_is_kept_in_the_checkpoint(tmp_path):
    """The default topology decides by the clock: whatever it decides, it says so and the replicas are equal."""
    monitor, again = lgc.CommunicationMonitor(), lgc.CommunicationMonitor()
    compressor = lgc.DGC(sparsity=0.9, warmup_epochs=0, dense_epochs=0, min_elements=32)
    trainer, after = fit(lgc.CompressedDDPStrategy(compressor), epochs=5, callbacks=[monitor])
    trainer.save_checkpoint(tmp_path / "tried.ckpt")
    fit(lgc.CompressedDDPStrategy(compressor), epochs=6, callbacks=[again], ckpt_path=tmp_path / "tried.ckpt")
    assert spread(after) == 0
    decided = {
        "all_gather": "Steps are compressed (all_gather) from now on",
        "all_reduce": "Steps are dense from now on",
    }
    if RANK == 0:
        summary = monitor.summary()
        assert summary["auto"].startswith(decided[summary["topology"]])
        assert again.summary()["auto"] == summary["auto"]


@on_ranks(2)
def test_sparsity_follows_the_callback_by_epoch_and_by_step():
    seen = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer, *args):
            seen.append(trainer.strategy.averager.stats.sparsity)

    fit(sparse(), callbacks=[lgc.SparsityWarmup([0.8], dense=1), Look()])
    assert seen == [0] * 10 + [0.8] * 10 + [0.9] * 10
    seen.clear()
    by_step = lgc.SparsityWarmup(lambda epoch, step: 0.0 if step < 5 else 0.95)
    fit(sparse(), epochs=1, callbacks=[by_step, Look()])
    assert seen == [0] * 5 + [0.95] * 5


@pytest.mark.parametrize("differ", [False, True])
@on_ranks(2)
def test_only_ranks_that_hold_other_weights_are_sent_them(differ):
    with mock.patch.object(distributed, "_sync_module_states", wraps=distributed._sync_module_states) as sending:
        _, after = fit(sparse(), epochs=1, limit_train_batches=1, seed=differ * RANK)
    assert sending.called == differ and spread(after) == 0


@on_ranks(2)
def test_a_checkpoint_is_also_one_of_plain_ddp(tmp_path):
    path, without = tmp_path / "dgc.ckpt", tmp_path / "weights.ckpt"
    stopped, _ = fit(sparse(), epochs=2)
    with counted_collectives() as besides_gathering:
        stopped.save_checkpoint(path)
    assert besides_gathering == {"all_reduce": 1, "barrier": 1}  # ranks meet, before and after
    stopped.save_checkpoint(without, weights_only=True)
    assert "lightning_gradcomp" not in torch.load(without, weights_only=True)
    content = torch.load(path, weights_only=True)
    ranks = [rank["memory"]["momentum"]["features.0.weight"] for rank in content["lightning_gradcomp"]["ranks"]]
    [optimizer] = content["optimizer_states"]
    buffers = {index: state["momentum_buffer"] for index, state in optimizer["state"].items()}
    assert len(buffers) == 6 and float((sum(ranks) / 2 - buffers[0]).abs().max()) <= 1e-7
    assert optimizer["param_groups"][0]["momentum"] == 0.9
    assert fit("ddp", epochs=3, ckpt_path=path)[0].global_step == 30


@on_ranks(2)
def test_a_checkpoint_of_plain_ddp_continues(tmp_path):
    """In a dense phase exactly, in a sparse one with its momentum."""
    _, straight = fit("ddp", epochs=2)
    fit("ddp", epochs=1)[0].save_checkpoint(tmp_path / "ddp.ckpt")
    _, dense = fit(forced(compressor=lgc.DGC(sparsity=0)), epochs=2, ckpt_path=tmp_path / "ddp.ckpt")
    assert apart(straight, dense) <= 1e-6
    now_sparse, _ = fit(sparse(dense_epochs=0), epochs=2, ckpt_path=tmp_path / "ddp.ckpt")
    assert now_sparse.strategy.averager.stats.sparsity == pytest.approx(0.9)


def running_mean(trainer):
    return trainer.lightning_module.features[1].running_mean


@on_ranks(2)
def test_a_compressed_step_is_one_round_trip_and_batch_norms_are_rank_0s_when_somebody_looks():
    class Count(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            if index == 0:  # what the first step needs once is not what a step needs
                calls.clear()
            if index == 8:
                assert calls == {ALL_GATHER: 8}
                assert spread(running_mean(trainer)) > 0

    with counted_collectives() as calls:
        trainer, _ = fit(sparse(dense_epochs=0), epochs=1, callbacks=[Count()])
    assert spread(running_mean(trainer)) == 0
    each_its_own = forced(sparse(dense_epochs=0).compressor, broadcast_buffers=False)
    assert spread(running_mean(fit(each_its_own, epochs=1)[0])) > 0
