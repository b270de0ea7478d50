"""Fine-tuning: a network that knows the digits 0 to 4 learns 5 to 9, two processes, DGC.

python docs/examples/fine_tuning.py [epochs]
"""

import sys

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import lightning_gradcomp as lgc


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        convolutions = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.trunk = nn.Sequential(convolutions[0], nn.ReLU(), convolutions[1], nn.ReLU(), nn.Flatten())
        self.neck = nn.Sequential(nn.Linear(64 * 16, 128), nn.ReLU())
        self.head = nn.Linear(128, 5)

    def forward(self, images):
        return self.head(self.neck(self.trunk(images)))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    images, old = (pixels / 16).float().view(-1, 1, 8, 8), labels < 5
    model = Digits()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(TensorDataset(images[old], labels[old]), 32):  # you would load weights here
        sgd.zero_grad()
        model.training_step(batch, 0).backward()
        sgd.step()
    model.trunk.requires_grad_(False)  # is not sent
    model.head.reset_parameters()
    train, val = random_split(TensorDataset(images[~old], labels[~old] - 5), [700, 196])
    compressor = lgc.DGC(exclude=["head.*"])  # a new head travels uncompressed
    monitor = lgc.CommunicationMonitor()
    trainer = L.Trainer(
        strategy=lgc.CompressedDDPStrategy(compressor, topology="all_gather"),
        accelerator="cpu", devices=2, max_epochs=int(sys.argv[1]) if len(sys.argv) > 1 else 8, callbacks=[monitor],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(train, 16, shuffle=True), DataLoader(val, 98))
    if trainer.is_global_zero:
        last = monitor.summary()["last_step"]
        print(f"accuracy {trainer.callback_metrics['accuracy']:.1%}, ratio of the last step {last['ratio']:.0f}")
