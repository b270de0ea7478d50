"""Runs on every rank of a world: trainings with dist_async. Prints the outcomes as one JSON line.

usage: async_script.py FOLDER
"""

import copy
import json
import logging
import math
import os
import signal
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn

import lightning_gradcomp as lgc
from lightning_gradcomp.app.compose import SaveOnSigterm

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
SMALL = {"sparsity": 0.9, "min_elements": 32}


class Net(L.LightningModule):
    """A small classifier with batch norm, a frozen weight and a buffer, whose learning rate falls."""

    lr = 0.05

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(1 + torch.rand(1) / 100, requires_grad=False)
        self.register_buffer("shift", torch.rand(1) / 100)
        layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)]
        self.layers, self.losses = nn.Sequential(*layers), []

    def loss(self, batch):
        return nn.functional.cross_entropy(self.layers(batch[0] * self.scale + self.shift), batch[1])

    def training_step(self, batch, index):
        return self.loss(batch)

    def validation_step(self, batch, index):
        self.log("loss", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self):
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


class Unequal(Net):
    """Rank 1 waits in its first batch until rank 0 has come to the last of the epoch. Has a teacher."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, *args):
        for mean, new in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
            mean.lerp_(new, 0.1)

    def training_step(self, batch, index):
        last = Path(sys.argv[1]) / "last batch"
        if self.global_rank == 0 and index == 3:
            last.touch()
        while self.global_rank == 1 and not last.exists():
            time.sleep(0.01)
        return self.loss(batch)


class Terminated(Net):
    """Rank 1 receives a SIGTERM in its second batch."""

    def training_step(self, batch, index):
        if self.global_rank == 1 and index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.loss(batch)


def batches():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(128, 1, 8, 8, generator=generator)
    labels = (images.mean((1, 2, 3)) * 30 + 5).long().clamp(0, 9)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), 16)


def fit(strategy, epochs, folder, devices, ckpt=None, model=None, callbacks=(), **options):
    """The trainer and the model after a fit that saves a checkpoint in each epoch."""
    model, saving = model or Net(), ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    monitor = [lgc.CommunicationMonitor()] if isinstance(strategy, lgc.AsyncStrategy) else []
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_epochs=epochs, num_sanity_val_steps=0, logger=False,
        callbacks=[saving, *monitor, *callbacks], enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(model, batches(), batches(), ckpt_path=ckpt)
    trainer.save_checkpoint(folder / "end.ckpt")
    return trainer, model


def terminated(folder):
    """Each rank's steps, and the checkpoint on the way out."""
    model, path = Terminated(), folder / "term.ckpt"
    with suppress(SIGTERMException):
        fit(lgc.AsyncStrategy("dgc"), 3, folder, 2, model=model, callbacks=[SaveOnSigterm(path)])
    steps = [None, None]
    dist.all_gather_object(steps, model.trainer.global_step)
    saved = torch.load(path, weights_only=True)
    remembered = [rank["steps"] for rank in saved["lightning_gradcomp_async"]["lightning_gradcomp"]["ranks"]]
    return {"steps": steps, "saved": saved["global_step"], "remembered": remembered}


def outcome(trainer, model):
    state = torch.cat([tensor.float().reshape(-1) for tensor in model.state_dict().values()])
    everyones = [torch.empty_like(state) for _ in range(2)]
    dist.all_gather(everyones, state)
    [summary] = [c.summary() for c in trainer.callbacks if isinstance(c, lgc.CommunicationMonitor)]
    return {
        "losses": model.losses,
        "spread": float((everyones[0] - everyones[1]).abs().max()),
        "pushes": sum(summary["async"]["staleness"].values()),
        "ratio": summary["ratio"],
        "steps": trainer.global_step,
    }


if __name__ == "__main__":
    from moving_average import Averaging

    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    compressed = {"compressor": lgc.DGC(**SMALL), "pull": "int8"}
    outcomes = {
        "none": outcome(*fit(lgc.AsyncStrategy(), 3, folder / "none", 2, model=Net(rank), gradient_clip_val=1.0)),
        "dgc": outcome(*fit(lgc.AsyncStrategy(**compressed, staleness=1), 3, folder / "dgc", 2)),
    }
    dist.barrier()
    trainer, model = fit(lgc.AsyncStrategy(**compressed), 1, folder / "validated", 2)
    trainer.validate(model, batches(), verbose=False)
    trainer.save_checkpoint(folder / "validated" / "again.ckpt")
    dist.barrier()
    on = fit(lgc.AsyncStrategy(**compressed), 4, folder / "on", 2, ckpt=folder / "dgc" / "end.ckpt")
    outcomes["resumed"] = outcome(*on)
    averaging = Averaging()
    free = fit(lgc.AsyncStrategy(staleness=math.inf), 1, folder / "free", 2, model=Unequal(), callbacks=[averaging])
    outcomes["free"] = {**outcome(*free), "averages": averaging.differs}
    outcomes["terminated"] = terminated(folder / "terminated")
    print(json.dumps(outcomes))
