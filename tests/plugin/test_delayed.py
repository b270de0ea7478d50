"""strategy="dga" in Lightning, on two ranks."""

import copy
import warnings
from functools import partial

import lightning as L
import pytest
import torch
from features_kit import apart, on_every_rank, spread
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from moving_average import Averaging
from torch import nn

import lightning_gradcomp as lgc
from tests.processes import on_ranks

HALF = lgc.GradientDropping(min_elements=32, warmup_epochs=0, sparsity=0.5, mean="senders")
METHODS = {
    "none": {"compressor": lgc.NoCompression()},
    "dgc": {"compressor": lgc.DGC(min_elements=32, warmup_epochs=0, dense_epochs=0, sparsity=0.9)},
    "gather": {"compressor": HALF, "error_decay": 0.9},
    "sidecar": {"compressor": HALF, "error_decay": 0.9, "checkpoint_state": "sidecar"},
    "several": {"compressor": HALF, "error_decay": 0.9},
    "averaged": {"compressor": HALF, "error_decay": 0.9},
}
"""Options of the strategy. The last four differ in what becomes of residuals, in optimizers, and in moving averages."""


def state_of(module):
    """Weights and buffers in one vector."""
    return torch.cat([tensor.detach().float().reshape(-1) for tensor in module.state_dict().values()])


class Net(L.LightningModule):
    """Its data depend on rank, epoch and batch alone, so a resumed run sees the batches that are left."""

    def __init__(self, sync_dist=False):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
        self.sync_dist = sync_dist
        self.seen = {"batch": [], "epoch": [], "validation": [], "losses": []}

    def loss(self, index, epoch):
        seed = 1000 * epoch + 10 * index + self.global_rank
        images = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
        return nn.functional.cross_entropy(self.layers(images), (images.mean((1, 2, 3)) * 30 + 5).long().clamp(0, 9))

    def training_step(self, _, index):
        loss = self.loss(index, self.current_epoch)
        if self.sync_dist:
            self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs, _, index):
        if not self.sync_dist:
            self.seen["batch"].append(spread(state_of(self)))

    def on_train_epoch_end(self):
        self.seen["epoch"].append(spread(state_of(self)))

    def on_validation_epoch_start(self):
        self.seen["validation"].append(spread(state_of(self)))

    def validation_step(self, _, index):
        self.seen["losses"].append(float(self.loss(index, 9)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class Several(Net):
    """Two optimizers in turns, as in a GAN: one in every batch, the other in every second, neither in the fourth."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, _, index):
        for number, optimizer in enumerate(self.optimizers()):
            if index != 3 and (number == 0 or index % 2 == 0):
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(self.loss(index, self.current_epoch))
                optimizer.step()
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        head = torch.optim.SGD(self.layers[4].parameters(), lr=0.02, momentum=0.9)
        return head, torch.optim.AdamW(self.layers[:2].parameters(), lr=0.003)


class Averaged(Net):
    """With a teacher in the module, and a moving average in a callback."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    def configure_callbacks(self):
        self.averaging = Averaging()
        return [self.averaging]

    def loss(self, index, epoch):
        self.follow()
        return super().loss(index, epoch)

    @torch.no_grad()
    def follow(self):
        for mean, new in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
            mean.lerp_(new, 0.1)


def fit(strategy, *, resume=None, callbacks=(), net=Net, every=6):
    L.seed_everything(3, verbose=False)
    net = net()
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=2, val_check_interval=every, logger=False,
        callbacks=list(callbacks), enable_checkpointing=bool(callbacks), use_distributed_sampler=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        log_every_n_steps=1,
    )  # fmt: skip
    loaders = torch.utils.data.DataLoader(range(10)), torch.utils.data.DataLoader(range(2))
    trainer.fit(net, *loaders, ckpt_path=resume)
    return trainer, net


def same(one, other):
    return apart(state_of(one), state_of(other)) == 0


@pytest.mark.parametrize("method", METHODS)
@on_ranks(2)
def test_ranks_are_equal_whenever_weights_are_read_and_a_run_resumes_in_mid_round(method, tmp_path):
    make = {"several": Several, "averaged": Averaged}.get(method, Net)

    def run(folder, resume=None):
        saved = ModelCheckpoint(tmp_path / folder, "{step}", every_n_train_steps=7, save_top_k=-1)
        strategy = lgc.DelayedStrategy(**{"period": 3, "delay": 2, **METHODS[method]})
        return fit(strategy, callbacks=[saved], net=make, resume=resume)

    trainer, straight = run("straight")
    seen = straight.seen
    assert max(seen["batch"]) > 1e-4
    assert seen["validation"] == seen["epoch"] == [0, 0] and spread(state_of(straight)) == 0
    first, second, *later = on_every_rank(seen["losses"])[0]
    assert sum(later) < first + second  # of the same batches
    steps = 18 if method == "several" else 20  # batches in which an optimizer steps
    assert trainer.strategy.averager.steps == steps

    path = tmp_path / "straight" / "step=7.ckpt"
    assert "lightning_gradcomp_delayed" in torch.load(path, weights_only=True)
    _, resumed = run("again", path)
    assert same(straight, resumed)
    if method == "averaged":
        one, other = straight.averaging, resumed.averaging
        assert one.differs == other.differs == 0 and same(one.average, other.average)


@on_ranks(2)
def test_the_statistics_of_averaged_weights_are_the_same_on_all_ranks(tmp_path):
    """StochasticWeightAveraging gathers them in an epoch without steps."""
    swa = StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=1)
    _, net = fit(lgc.DelayedStrategy(period=3, delay=2), callbacks=[swa, ModelCheckpoint(tmp_path)])
    assert spread(state_of(net)) == 0


def compiled():
    net = Net()
    net.layers.compile(backend="eager")
    return net


@on_ranks(2)
def test_a_compiled_network_trains_as_without():
    runs = [fit(lgc.DelayedStrategy(period=3, delay=2, **METHODS["dgc"]), net=make)[1] for make in (Net, compiled)]
    assert apart(*map(state_of, runs)) <= 1e-6


@on_ranks(2)
def test_the_monitor_shows_what_rounds_cost_and_a_wait_in_a_training_step_is_told_once(tmp_path):
    monitor = lgc.CommunicationMonitor()
    callbacks = [monitor, ModelCheckpoint(tmp_path)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, _ = fit("dga", callbacks=callbacks, net=partial(Net, sync_dist=True), every=1.0)
    assert isinstance(trainer.strategy, lgc.DelayedStrategy)
    if trainer.global_rank:
        return
    [told] = [str(w.message) for w in caught if "waits for the other ranks" in str(w.message)]
    assert "sync_dist=True" in told and "ms this time" in told
    logged, summary = set(trainer.logged_metrics), monitor.summary()
    assert {"comm/bytes_sent", "comm/ratio_N2", "time/exchange_ms"} <= logged
    assert {"dga/overlapped_steps", "dga/late_rounds", "dga/consensus_distance"} <= logged
    assert "memory/residual_to_gradient" not in logged
    rounds = summary["rounds"]
    assert (rounds["period"], rounds["delay"], rounds["rounds"]) == (8, 8, 2)
    assert summary["steps"] == 20
    assert 0 < summary["bytes_sent"] < summary["dense_bytes"] / 2
    assert summary["totals"]["bytes_sent"] == rounds["bytes_sent"] == summary["bytes_sent"]
    assert rounds["consensus_distance"] > 0 and rounds["stall_seconds"] > 0
    assert min(summary["milliseconds"]["exchange"], summary["milliseconds"]["compute"]) > 0


class Saves(Net):
    """Saves a checkpoint in the third batch, in one of its hooks."""

    def __init__(self, place, path):
        super().__init__()
        self.place, self.path = place, path

    def save(self, place, index):
        if place == self.place and index == 2:
            self.trainer.save_checkpoint(self.path)

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.save("training_step", index)
        return loss

    def on_before_backward(self, loss):
        self.save("on_before_backward", self.trainer.fit_loop.batch_idx)

    def on_before_optimizer_step(self, optimizer):
        self.save("on_before_optimizer_step", self.trainer.fit_loop.batch_idx)

    def on_train_batch_end(self, outputs, batch, index):
        self.save("on_train_batch_end", index)


class SavesAfterStepping(Several):
    def training_step(self, batch, index):
        super().training_step(batch, index)
        self.trainer.save_checkpoint("never written")


@pytest.mark.parametrize("place", ["on_before_optimizer_step", "on_train_batch_end"])
@on_ranks(2)
def test_a_checkpoint_after_backward_is_saved(place, tmp_path):
    path = tmp_path / "in_step.ckpt"
    fit(lgc.DelayedStrategy(period=3, delay=2), net=partial(Saves, place, path))
    assert path.is_file()


class TorchsOptimizer(Net):
    def optimizer_step(self, epoch, index, optimizer, closure):
        optimizer.optimizer.step(closure)


class TorchsOptimizers(Several):
    def optimizers(self):
        return super().optimizers(use_pl_optimizer=False)


class NoOptimizer(Several):
    """Steps an optimizer that Lightning does not know."""

    def configure_optimizers(self):
        return None


OWN = 'got "torch\'s own SGD", allowed: one from self.optimizers'
REFUSED = {
    "a save in training_step": (
        partial(Saves, "training_step", "never written"), "checkpoint with DelayedStrategy: got 'one between forward",
    ),
    "a save before backward": (
        partial(Saves, "on_before_backward", "never written"),
        "checkpoint with DelayedStrategy: got 'one between forward",
    ),
    "a save by hand": (SavesAfterStepping, "checkpoint with DelayedStrategy: got 'one inside training_step'"),
    "torch's optimizer": (TorchsOptimizer, f"optimizer with DelayedStrategy: {OWN}"),
    "torch's optimizers": (TorchsOptimizers, f"optimizer with DelayedStrategy: {OWN}"),
    "no optimizer": (NoOptimizer, "configure_optimizers with DelayedStrategy: got 'no optimizer of the model'"),
}  # fmt: skip
"""Checkpoints inside a step, and steps that would not be averaged."""


@pytest.mark.parametrize("case", REFUSED)
@on_ranks(2)
def test_it_is_refused_in_training(case):
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        fit(lgc.DelayedStrategy(period=3, delay=2), net=make)


@on_ranks(2)
def test_torchs_own_optimizer_is_refused_by_dist_async_too():
    with pytest.raises(ValueError, match=f"optimizer with AsyncStrategy: {OWN}"):
        fit(lgc.AsyncStrategy(), net=TorchsOptimizer)


# Without ranks


def test_sparseloco_is_a_name_of_the_trainer():
    strategy = L.Trainer(strategy="sparseloco", accelerator="cpu", devices=2, logger=False).strategy
    assert isinstance(strategy, lgc.DelayedStrategy)
    rule = strategy.rule
    assert (rule["period"], rule["delay"], rule["error_decay"]) == (15, 0, 0.95)
    assert strategy.compressor == lgc.SPARSELOCO["compressor"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"find_unused_parameters": True}, "got 'find_unused_parameters', allowed: no DDP options"),
        ({"model_averaging_period": 4}, "got 'model_averaging_period', allowed: no DDP options"),
        ({"delay": 9}, "delay: got 9, allowed: 0 to 8"),
        ({"period": 0}, "period: got 0"),
        ({"compressor": "lzma"}, "got 'lzma', allowed: .*powersgd"),
        ({"error_decay": 2}, "error_decay: got 2, allowed: None, or a number from 0 to 1"),
        ({"checkpoint_state": "all"}, "checkpoint_state: got 'all', allowed: 'auto', 'gather', 'sidecar'"),
        ({"checkpoint_state": "mean"}, "checkpoint_state: got 'mean', allowed: 'auto': without error_decay"),
    ],
    ids=str,
)
def test_options_that_can_not_be_honoured_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        lgc.DelayedStrategy(**options)


class Two(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_batchnorm": True}, "sync_batchnorm with DelayedStrategy: got True"),
        ({"callbacks": [lgc.SparsityWarmup()]}, "SparsityWarmup: got 'DelayedStrategy'"),
    ],
    ids=["sync_batchnorm", "SparsityWarmup"],
)
def test_refused_before_processes_start(options, message, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    strategy = lgc.DelayedStrategy("dgc")
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, **options)
    with pytest.raises(ValueError, match=message):
        trainer.fit(Two(), torch.utils.data.DataLoader(range(2)))


class Accumulates(L.LightningModule):
    """Two backward passes in a step, the first inside DDP's `no_sync`."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        with self.trainer.model.no_sync():
            self.manual_backward(self.layer(batch).square().mean())
        self.manual_backward(self.layer(batch).mean())
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_no_sync_of_ddp_has_nothing_to_do():
    def trained(strategy):
        L.seed_everything(0, verbose=False)
        net = Accumulates()
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(net, torch.ones(4, 4))
        assert not hasattr(net, "no_sync")
        return net.layer.weight.detach()

    assert torch.equal(trained("dga"), trained("ddp"))
    torch.distributed.destroy_process_group()
