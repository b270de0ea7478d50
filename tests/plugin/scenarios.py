"""Runs on every rank of a world: Lightning trainings whose outcomes the tests compare. Prints them as one JSON line.

usage: scenarios.py FOLDER
"""

import json
import logging
import os
import sys
import warnings
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import lightning as L
import torch
from strategies import forced
from torch import nn
from torch.nn.parallel import distributed

import lightning_gradcomp as lgc

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
FOLDER = Path(sys.argv[1])


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


def fit(strategy, *, epochs=3, ckpt_path=None, nesterov=False, callbacks=(), seed=0, **options):
    """Train from a seed; returns (trainer, all weights as one vector)."""
    L.seed_everything(seed, verbose=False)
    net = Net(nesterov)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=WORLD, max_epochs=epochs, logger=False, callbacks=list(callbacks),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(net, data(), ckpt_path=ckpt_path)
    return trainer, weights(net)


def weights(net):
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


def apart(a, b):
    """Largest difference between two weight vectors, over all ranks."""
    difference = (a - b).abs().max()
    torch.distributed.all_reduce(difference, op=torch.distributed.ReduceOp.MAX)
    return difference.item()


def sparse(**options):
    return forced(compressor=lgc.DGC(sparsity=0.9, warmup_epochs=1, min_elements=32, **options))


@contextmanager
def counted_collectives():
    """Inside, calls of torch.distributed's collectives are counted by name."""
    calls, names = Counter(), {"broadcast", "all_reduce", "all_gather_single", "all_gather_into_tensor", "barrier"}

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


def dense_limit():
    _, stock = fit("ddp", nesterov=True)
    _, dense = fit("ddp_dense", nesterov=True)
    _, nothing_dropped = fit(forced(compressor=lgc.DGC(sparsity=0)), nesterov=True)
    return [apart(stock, dense), apart(stock, nothing_dropped)]


def sparse_training():
    monitor, keep = lgc.CommunicationMonitor(), Keep()
    trainer, after = fit(sparse(), accumulate_grad_batches=2, log_every_n_steps=1, callbacks=[monitor, keep])
    first = everyones_first(after)
    return {
        "groups_seen": sorted(trainer.lightning_module.seen),
        "at_local_weights": trainer.lightning_module.at_local_weights,
        "replicas_apart": apart(after, first),
        "logged": {key: float(value) for key, value in keep.logged.items()},
        "summary": monitor.summary(),
    }


def warm_up():
    seen = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer, *args):
            seen.append(trainer.strategy.averager.stats.sparsity)

    by_epoch = lgc.SparsityWarmup([0.8], dense=1)
    fit(sparse(), callbacks=[by_epoch, Look()])
    by_step = lgc.SparsityWarmup(lambda epoch, step: 0.0 if step < 5 else 0.95)
    fit(sparse(), epochs=1, callbacks=[by_step, Look()])
    return seen


def saved():
    stopped, _ = fit(sparse(), epochs=2)
    with counted_collectives() as besides_gathering:
        stopped.save_checkpoint(FOLDER / "dgc.ckpt")
    stopped.save_checkpoint(FOLDER / "weights.ckpt", weights_only=True)
    content = torch.load(FOLDER / "dgc.ckpt", weights_only=True)
    ranks = [rank["memory"]["momentum"] for rank in content["lightning_gradcomp"]["ranks"]]
    buffers = content["optimizer_states"][0]["state"]
    mean = (ranks[0]["features.0.weight"] + ranks[1]["features.0.weight"]) / 2
    under_ddp, _ = fit("ddp", epochs=3, ckpt_path=FOLDER / "dgc.ckpt")
    return {
        "besides_gathering": besides_gathering,
        "exported_momentum_apart": (mean - buffers[0]["momentum_buffer"]).abs().max().item(),
        "buffers_in_checkpoint": len([entry for entry in buffers.values() if "momentum_buffer" in entry]),
        "momentum_in_checkpoint": content["optimizer_states"][0]["param_groups"][0]["momentum"],
        "steps_under_ddp": under_ddp.global_step,
        "state_in_weights_only": "lightning_gradcomp" in torch.load(FOLDER / "weights.ckpt", weights_only=True),
    }


def plain_to_sparse():
    """A plain DDP checkpoint continues under DGC: in a dense phase exactly, in a sparse one with its momentum."""
    _, straight = fit("ddp", epochs=2)
    stopped, _ = fit("ddp", epochs=1)
    stopped.save_checkpoint(FOLDER / "ddp.ckpt")
    strategy = forced(compressor=lgc.DGC(sparsity=0))
    _, dense = fit(strategy, epochs=2, ckpt_path=FOLDER / "ddp.ckpt")
    now_sparse, _ = fit(sparse(dense_epochs=0), epochs=2, ckpt_path=FOLDER / "ddp.ckpt")
    return {"dense_apart": apart(straight, dense), "sparsity": now_sparse.strategy.averager.stats.sparsity}


def round_trips():
    """What is exchanged in compressed steps; how far the ranks' batch norms are apart then, and at the end."""
    apart_in_training = []

    class Count(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            if index == 0:  # what the first step needs once is not what a step needs
                calls.clear()
            if index == 8:
                calls_of_eight_steps.update(calls)
                mean = module.features[1].running_mean
                apart_in_training.append(apart(mean, everyones_first(mean)))

    calls_of_eight_steps = Counter()
    with counted_collectives() as calls:
        trainer, _ = fit(sparse(dense_epochs=0), epochs=1, callbacks=[Count()])
    mean = trainer.lightning_module.features[1].running_mean
    each_its_own = forced(sparse(dense_epochs=0).compressor, broadcast_buffers=False)
    own = fit(each_its_own, epochs=1)[0].lightning_module.features[1].running_mean
    return {
        "calls": calls_of_eight_steps,
        "apart_in_training": apart_in_training,
        "apart_at_the_end": apart(mean, everyones_first(mean)),
        "own_apart_at_the_end": apart(own, everyones_first(own)),
    }


def initial_weights():
    """Whether DDP has sent the weights to ranks that had them, and to others; how far these are apart after a step."""
    sent = []
    for seed in (0, int(os.environ["RANK"])):
        with mock.patch.object(distributed, "_sync_module_states", wraps=distributed._sync_module_states) as sending:
            _, after = fit(sparse(), epochs=1, limit_train_batches=1, seed=seed)
        sent.append(sending.called)
    return {"sent": sent, "apart": apart(after, everyones_first(after))}


def tried():
    """The default topology, which decides by the clock: whatever it decides, it says so and the replicas are equal."""
    monitor, again = lgc.CommunicationMonitor(), lgc.CommunicationMonitor()
    compressor = lgc.DGC(sparsity=0.9, warmup_epochs=0, dense_epochs=0, min_elements=32)
    trainer, after = fit(lgc.CompressedDDPStrategy(compressor), epochs=5, callbacks=[monitor])
    trainer.save_checkpoint(FOLDER / "tried.ckpt")
    fit(lgc.CompressedDDPStrategy(compressor), epochs=6, callbacks=[again], ckpt_path=FOLDER / "tried.ckpt")
    summary = monitor.summary()
    return {
        "auto": summary["auto"],
        "auto_of_the_resumed": again.summary()["auto"],
        "topology": summary["topology"],
        "replicas_apart": apart(after, everyones_first(after)),
    }


def everyones_first(tensor):
    """Rank 0's, on every rank."""
    first = tensor.clone()
    torch.distributed.broadcast(first, 0)
    return first


if __name__ == "__main__":
    WORLD = int(os.environ["WORLD_SIZE"])
    outcome = {
        f.__name__: f()
        for f in (
            dense_limit, sparse_training, warm_up, saved, plain_to_sparse, round_trips, initial_weights, tried,
        )
    }  # fmt: skip
    if os.environ["RANK"] == "0":
        print(json.dumps(outcome))
