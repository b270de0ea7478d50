"""Fabric: a small network on scikit-learn's digits, two processes, DGC. The loop is yours.

python docs/examples/fabric_digits.py [epochs]
"""

import sys

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_gradcomp as lgc


def network():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


if __name__ == "__main__":
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    # A dense epoch, an epoch at 90 %, then 99 %. "all_gather" compresses whatever the clock says: between two processes
    # of one machine the default, topology="auto", would go on dense.
    compressor = lgc.DGC(sparsity=0.99, dense_epochs=1, warmup_epochs=1)
    strategy = lgc.CompressedFabricStrategy(compressor, topology="all_gather")
    fabric = L.Fabric(strategy=strategy, accelerator="cpu", devices=2)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    train, val = torch.utils.data.random_split(TensorDataset(images, torch.tensor(labels)), [1437, 360])
    train_loader, val_loader = fabric.setup_dataloaders(DataLoader(train, 32, shuffle=True), DataLoader(val, 128))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    for epoch in range(epochs):
        strategy.set_epoch(epoch)  # the warm-up counts epochs
        for images, labels in train_loader:
            optimizer.zero_grad()
            with strategy.local_weights():  # with what this rank has not sent yet
                fabric.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
    with torch.no_grad():
        right = sum(((model(images).argmax(1) == labels).float().mean() for images, labels in val_loader))
    accuracy = fabric.all_reduce(right / len(val_loader))
    if fabric.is_global_zero:
        print(f"accuracy {accuracy:.1%}, ratio of the last step {strategy.averager.stats.ratio:.0f}")
