"""A training script of one's own, on two machines: ResNet-18 on scikit-learn's digits.

torchrun --nnodes=2 --nproc-per-node=1 ... docs/examples/two_machines.py COMPRESSOR [BACKEND] [STEPS]

COMPRESSOR is a name such as dgc, or ddp for Lightning's own strategy. BACKEND is gloo, the default, or nccl.
"""

import os
import sys
import time

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

import lightning_gradcomp as lgc


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = resnet18(num_classes=10)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)

    def train_dataloader(self):
        pixels, labels = load_digits(return_X_y=True)
        images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
        large = nn.functional.interpolate(images, size=(32, 32)).expand(-1, 3, -1, -1)
        return DataLoader(TensorDataset(large, torch.tensor(labels)), batch_size=32, shuffle=True, drop_last=True)


class StepTime(L.Callback):
    """Prints the median of the last 20 steps: after the trial of topology="auto", and the 80 with which DGC begins."""

    def on_train_start(self, trainer, module):
        self.ends = []

    def on_train_batch_end(self, trainer, module, *_):
        self.ends.append(time.perf_counter())

    def on_train_end(self, trainer, module):
        if trainer.is_global_zero:
            steps = torch.tensor(self.ends).diff()[-20:]
            print(f"{1000 * steps.median():.0f} ms a step")


if __name__ == "__main__":
    world = os.environ
    devices = int(world.get("LOCAL_WORLD_SIZE") or world.get("SLURM_NTASKS_PER_NODE", 1))
    nodes = int(world["WORLD_SIZE"]) // devices if "WORLD_SIZE" in world else int(world.get("SLURM_NNODES", 1))
    name, backend = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "gloo"
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else 100
    if name == "ddp":
        strategy = DDPStrategy(process_group_backend=backend)
    else:
        strategy = lgc.CompressedDDPStrategy(name, process_group_backend=backend)
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        strategy=strategy, devices=devices, num_nodes=nodes, max_steps=steps, max_epochs=-1, callbacks=[StepTime()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net())
