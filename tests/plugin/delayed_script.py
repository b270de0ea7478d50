"""Runs on every rank of a world: trainings with delayed averages. Prints what the tests look at as one JSON line.

usage: delayed_script.py FOLDER
"""

import copy
import json
import logging
import sys
import warnings
from functools import partial
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from moving_average import Averaging
from torch import nn

import lightning_gradcomp as lgc

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
FOLDER = Path(sys.argv[1])
HALF = lgc.GradientDropping(min_elements=32, warmup_epochs=0, sparsity=0.5, mean="senders")
METHODS = {
    "none": {"compressor": lgc.NoCompression()},
    "dgc": {"compressor": lgc.DGC(min_elements=32, warmup_epochs=0, dense_epochs=0, sparsity=0.9)},
    "gather": {"compressor": HALF, "error_decay": 0.9},
    "sidecar": {"compressor": HALF, "error_decay": 0.9, "checkpoint_state": "sidecar"},
    "several": {"compressor": HALF, "error_decay": 0.9},
    "averaged": {"compressor": HALF, "error_decay": 0.9},
}
"""Options of the strategy, by name of the test."""


def apart(module):
    """How far the ranks' weights and buffers are from rank 0's."""
    own = torch.cat([tensor.detach().float().reshape(-1) for tensor in module.state_dict().values()])
    first = own.clone()
    dist.broadcast(first, 0)
    distance = (own - first).abs().max().view(1)
    dist.all_reduce(distance, op=dist.ReduceOp.MAX)
    return float(distance)


class Net(L.LightningModule):
    """Its data depend on rank, epoch and batch alone, so a run that goes on sees those that it has not seen yet."""

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
            self.seen["batch"].append(apart(self))

    def on_train_epoch_end(self):
        self.seen["epoch"].append(apart(self))

    def on_validation_epoch_start(self):
        self.seen["validation"].append(apart(self))

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
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=FOLDER, num_sanity_val_steps=0,
        log_every_n_steps=1,
    )  # fmt: skip
    loaders = torch.utils.data.DataLoader(range(10)), torch.utils.data.DataLoader(range(2))
    trainer.fit(net, *loaders, ckpt_path=resume)
    return trainer, net


def same(a, b):
    """Largest difference of two modules' states."""
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return max(float((x.float() - y.float()).abs().max()) for x, y in pairs)


def goes_on(name):
    """A run that saves in the middle of a round, and one that goes on from there."""
    options = {"period": 3, "delay": 2, **METHODS[name]}
    make = {"several": Several, "averaged": Averaged}.get(name, Net)
    saved = ModelCheckpoint(FOLDER / name, "{step}", every_n_train_steps=7, save_top_k=-1)
    trainer, straight = fit(lgc.DelayedStrategy(**options), callbacks=[saved], net=make)
    path = FOLDER / name / "step=7.ckpt"
    again = ModelCheckpoint(FOLDER / f"{name} again", "{step}", every_n_train_steps=7, save_top_k=-1)
    _, resumed = fit(lgc.DelayedStrategy(**options), callbacks=[again], resume=path, net=make)
    in_checkpoint = "lightning_gradcomp_delayed" in torch.load(path, weights_only=True)
    found = {"end": apart(straight), "differs": same(straight, resumed), "saved": in_checkpoint}
    if name == "averaged":
        averages = straight.averaging, resumed.averaging
        found["averages"] = [same(*(each.average for each in averages)), *(each.differs for each in averages)]
    return {**straight.seen, **found, "steps": trainer.strategy.averager.steps}


def compiled():
    """A compiled network, against the same run without."""
    options = {"period": 3, "delay": 2, **METHODS["dgc"]}
    _, plain = fit(lgc.DelayedStrategy(**options))

    def make():
        net = Net()
        net.layers.compile(backend="aot_eager")
        return net

    _, after = fit(lgc.DelayedStrategy(**options), net=make)
    return same(plain, after)


class Saves(Net):
    """Saves a checkpoint in the third batch, in one of its hooks."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def save(self, place, index):
        if place == self.place and index == 2:
            self.trainer.save_checkpoint(FOLDER / "in_step.ckpt")

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
        self.trainer.save_checkpoint(FOLDER / "in_step.ckpt")


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


def raised(make, strategy=None):
    """What training raises."""
    try:
        fit(strategy or lgc.DelayedStrategy(period=3, delay=2), net=make)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


outcome = {name: goes_on(name) for name in METHODS}
outcome["compiled"] = compiled()
swa = StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1, annealing_epochs=1)
outcome["swa"] = apart(fit(lgc.DelayedStrategy(period=3, delay=2), callbacks=[swa])[1])
monitor = lgc.CommunicationMonitor()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    trainer, _ = fit("dga", callbacks=[monitor], net=partial(Net, sync_dist=True), every=1.0)
assert isinstance(trainer.strategy, lgc.DelayedStrategy)
waits = [str(w.message) for w in caught if "waits for the other ranks" in str(w.message)]
outcome["monitor"] = {"summary": monitor.summary(), "logged": sorted(trainer.logged_metrics), "waits": waits}
places = "on_train_batch_end", "on_before_optimizer_step", "training_step", "on_before_backward"
outcome["saves"] = {place: raised(partial(Saves, place)) for place in places}
outcome["saves"]["manual"] = raised(SavesAfterStepping)
outcome["unseen steps"] = {each.__name__: raised(each) for each in (TorchsOptimizer, TorchsOptimizers, NoOptimizer)}
outcome["unseen steps"]["dist_async"] = raised(TorchsOptimizer, lgc.AsyncStrategy())
if dist.get_rank() == 0:
    print(json.dumps(outcome))
