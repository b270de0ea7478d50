"""FSDP2 inside a replica, DGC between replicas: scikit-learn's digits, four processes, two replicas of two shards.

python docs/examples/hsdp_digits.py [epochs] [compile]
"""

import sys

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

import lightning_gradcomp as lgc


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU()) for _ in range(3)]
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), *blocks, nn.Linear(128, 10))

    def configure_model(self):
        if isinstance(self.net, FSDPModule):
            return  # Lightning calls this again for another fit
        for block in self.net[2:-1]:
            if "compile" in sys.argv:
                block.compile()
            fully_shard(block, mesh=self.device_mesh["shard"])
        fully_shard(self.net, mesh=self.device_mesh["shard"])

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels))
    train, val = torch.utils.data.random_split(digits, [1437, 360])
    monitor = lgc.CommunicationMonitor()
    trainer = L.Trainer(
        strategy=lgc.CompressedHSDPStrategy(lgc.DGC(), shard=2), accelerator="cpu", devices=4, callbacks=[monitor],
        max_epochs=int(sys.argv[1]) if len(sys.argv) > 1 else 10,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Digits(), DataLoader(train, 8, shuffle=True), DataLoader(val, 90))
    if trainer.is_global_zero:
        last = monitor.summary()["last_step"]
        print(f"accuracy {trainer.callback_metrics['accuracy']:.1%}, ratio of the last step {last['ratio']:.0f}")
