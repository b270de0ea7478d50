"""A training in which something happens to rank 1. usage: fault_script.py KIND FOLDER [strategy] [seconds]

KIND: kill, stop, raise or fewer (batches), at step 8; nothing happens after a restart of torchrun.
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
from torch import nn

import lightning_gradcomp as lgc

KIND, FOLDER, STRATEGY, SECONDS = (sys.argv[1:] + ["dgc", "20"][len(sys.argv) - 3 :])[:4]
FIRST_TRY = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, index):
        if self.trainer.global_step == 8 and self.trainer.global_rank == 1 and FIRST_TRY:
            print(f"\n{KIND} at {time.time():.1f}", flush=True)
            if KIND == "raise":
                raise ArithmeticError("a mistake in the training step")
            if KIND in ("kill", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if KIND == "kill" else signal.SIGSTOP)
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self):
        fewer = KIND == "fewer" and self.trainer.global_rank == 1
        images = torch.randn(160 - 16 * fewer, 64, generator=torch.Generator().manual_seed(self.trainer.global_rank))
        dataset = torch.utils.data.TensorDataset(images, images.argmax(1) % 10)
        return torch.utils.data.DataLoader(dataset, 16)

    def on_exception(self, error):
        groups = [group["momentum"] for group in self.trainer.optimizers[0].param_groups]
        print(
            f"\nrank {self.trainer.global_rank} ends at {time.time():.1f} with momentum {groups}: {error}", flush=True
        )


class Say(L.Callback):
    def on_exception(self, trainer, module, error):
        module.on_exception(error)


if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    compressor = next(entry.cls for entry in lgc.entries() if entry.strategy == STRATEGY)
    options = {"warmup_epochs": 0} if STRATEGY != "ddp_dense" else {}
    options |= {"dense_epochs": 0} if STRATEGY == "dgc" else {}
    strategy = lgc.CompressedDDPStrategy(compressor(**options), timeout=timedelta(seconds=float(SECONDS)))
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=3, logger=False, enable_progress_bar=False,
        use_distributed_sampler=False, enable_model_summary=False,
        callbacks=[Say(), ModelCheckpoint(FOLDER, "last", every_n_train_steps=5, enable_version_counter=False)],
    )  # fmt: skip
    last = Path(FOLDER) / "last.ckpt"
    trainer.fit(Net(), ckpt_path=last if last.exists() else None)
    print(f"rank {trainer.global_rank} has done {trainer.global_step} steps, restored: {not FIRST_TRY}", flush=True)
