"""Lightning: a small network on scikit-learn's digits, two processes, DGC.

python docs/examples/lightning_digits.py [epochs]
"""

import sys

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_gradcomp as lgc


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        accuracy = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy, sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


if __name__ == "__main__":
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    L.seed_everything(0, verbose=False)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    train, val = torch.utils.data.random_split(TensorDataset(images, torch.tensor(labels)), [1437, 360])
    # A dense epoch, an epoch at 90 %, then 99 %. "all_gather" compresses whatever the clock says: between two processes
    # of one machine the default, topology="auto", would go on dense.
    compressor = lgc.DGC(sparsity=0.99, dense_epochs=1, warmup_epochs=1)
    monitor = lgc.CommunicationMonitor()
    trainer = L.Trainer(
        strategy=lgc.CompressedDDPStrategy(compressor, topology="all_gather"),
        accelerator="cpu", devices=2, max_epochs=epochs, callbacks=[monitor],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Digits(), DataLoader(train, 32, shuffle=True), DataLoader(val, 128))
    if trainer.is_global_zero:
        last = monitor.summary()["last_step"]
        print(f"accuracy {trainer.callback_metrics['accuracy']:.1%}, ratio of the last step {last['ratio']:.0f}")
