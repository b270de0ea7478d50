"""A training in which something happens to rank 1 at step 8. usage: fault_script.py KIND FOLDER STRATEGY SECONDS

KIND: kill, stop, raise, term (SIGTERM) or none. Nothing happens after a restart of torchrun's.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from strategies import forced
from torch import nn

import lightning_gradcomp as lgc

KIND, FOLDER, STRATEGY, SECONDS = sys.argv[1:]
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
FIRST_TRY = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def say(*what):
    print(" ".join(["\n" + f"{time.time():.1f}", *map(str, what)]), flush=True)  # in one piece: ranks share the output


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, index):
        rank = self.trainer.global_rank
        if self.trainer.global_step == 8 and rank == 1 and FIRST_TRY:
            say(KIND, "on rank", rank)
            if KIND == "raise":
                raise ArithmeticError("a mistake in the training step")
            if KIND in SIGNALS:
                os.kill(os.getpid(), SIGNALS[KIND])
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
    patience = timedelta(seconds=float(SECONDS))
    if STRATEGY == "dga":  # at step 8 the second round has just been sent
        strategy = lgc.DelayedStrategy(period=4, delay=3, timeout=patience)
    else:
        compressor = lgc.NoCompression() if STRATEGY == "ddp_dense" else lgc.DGC(dense_epochs=0, warmup_epochs=0)
        strategy = forced(compressor, timeout=patience)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=3, logger=False, enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Say(), ModelCheckpoint(FOLDER, "last", every_n_train_steps=5, enable_version_counter=False)],
    )  # fmt: skip
    images = torch.randn(320, 64)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, images.argmax(1) % 10), 16)
    last = Path(FOLDER) / "last.ckpt"
    restored = last.exists()
    trainer.fit(Net(), loader, ckpt_path=last if restored else None)
    say("rank", trainer.global_rank, "did", trainer.global_step, "steps, restored:", restored)
