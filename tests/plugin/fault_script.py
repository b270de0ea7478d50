"""A training with a fault on one rank. usage: fault_script.py KIND FOLDER STRATEGY SECONDS [RANK [PLACE]]

KIND: kill, stop, raise or none. RANK: 1 where none is given. PLACE: step (the ninth, where none is
given), start (of the training), save (a checkpoint), sidecar (its file), or metric (an exchange of the user's).
No fault happens after a restart of torchrun's.
"""

import inspect
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from strategies import forced
from torch import nn

import lightning_gradcomp as lgc

KIND, FOLDER, STRATEGY, SECONDS, RANK, PLACE = [*sys.argv[1:], *("1", "step")[len(sys.argv) - 5 :]]
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
FIRST_TRY = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def say(*what):
    print(" ".join(["\n" + f"{time.time():.1f}", *map(str, what)]), flush=True)  # in one piece: ranks share the output


def fault(place):
    if place == PLACE and FIRST_TRY and dist.get_rank() == int(RANK):
        say(KIND, "on rank", RANK)
        if KIND == "raise":
            raise ArithmeticError("a mistake in the training step")
        if KIND in SIGNALS:
            os.kill(os.getpid(), SIGNALS[KIND])


class Files(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        if "token" in checkpoint:
            fault("sidecar")
        super().save_checkpoint(checkpoint, path, storage_options)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def setup(self, stage):
        """The timeout counts from here on, so that it need not be long enough for a rank to start."""
        patience = timedelta(seconds=float(SECONDS))
        dist.distributed_c10d._set_pg_timeout(patience)
        self.trainer.strategy._timeout = patience  # of the group that delayed averages use

    def on_train_start(self):
        fault("start")

    def on_save_checkpoint(self, checkpoint):
        fault("save")

    def on_train_batch_start(self, *args):
        if self.trainer.global_step == 8 and PLACE == "metric":
            fault("metric")
            dist.all_reduce(torch.ones(1))

    def training_step(self, batch, index):
        if self.trainer.global_step == 8:
            fault("step")
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Say(L.Callback):
    def on_exception(self, trainer, module, error):
        momentum = [group["momentum"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        say("rank", trainer.global_rank, "ends with momentum", momentum, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    patience = timedelta(seconds=110)
    if STRATEGY == "dga":  # at step 8 the second round has just been sent
        strategy = lgc.DelayedStrategy(period=4, delay=3, timeout=patience)
    else:
        compressors = {"ddp_dense": lgc.NoCompression(), "ddp_int8": lgc.Int8(), "eden": lgc.EDEN(), "dgc": lgc.DGC()}
        strategy = forced(
            compressors[STRATEGY], timeout=patience, checkpoint_state="sidecar" if PLACE == "sidecar" else "gather"
        )
    save = {"every_n_train_steps": 5, "enable_version_counter": False}
    if KIND == "raise" and "save_on_exception" in inspect.signature(ModelCheckpoint).parameters:  # lightning 2.6
        save["save_on_exception"] = True
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=3, logger=False, enable_progress_bar=False,
        enable_model_summary=False, plugins=[Files()],
        callbacks=[Say(), ModelCheckpoint(FOLDER, "last", **save)],
    )  # fmt: skip
    images = torch.randn(320, 64)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, images.argmax(1) % 10), 16)
    last = Path(FOLDER) / "last.ckpt"
    restored = last.exists()
    trainer.fit(Net(), loader, ckpt_path=last if restored else None)
    say("rank", trainer.global_rank, "did", trainer.global_step, "steps, restored:", restored)
