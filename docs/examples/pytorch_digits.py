"""Plain PyTorch: a small network on scikit-learn's digits, DGC, a process for each rank.

torchrun --nproc-per-node=2 docs/examples/pytorch_digits.py [epochs]
"""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_gradcomp as lgc


def network():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


if __name__ == "__main__":
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights, and the same split, on every rank
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    train, val = torch.utils.data.random_split(TensorDataset(images, torch.tensor(labels)), [1437, 360])
    sampler = DistributedSampler(train)  # as many batches on every rank
    loader = DataLoader(train, 32, sampler=sampler)
    model = network()  # the bare module: the averager takes the place of DDP
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # A dense epoch, an epoch at 90 %, then 99 %.
    compressor = lgc.DGC(sparsity=0.99, dense_epochs=1, warmup_epochs=1)
    averager = lgc.GradientAverager(model, compressor, optimizer=optimizer, steps_per_epoch=len(loader))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            with averager.local_weights():  # with what this rank has not sent yet
                nn.functional.cross_entropy(model(images), labels).backward()
            averager.step()  # averages the gradients, then steps the optimizer
    if dist.get_rank() == 0:  # all ranks hold the same weights
        images, labels = next(iter(DataLoader(val, len(val))))
        accuracy = (model(images).argmax(1) == labels).float().mean()
        print(f"accuracy {accuracy:.1%}, ratio of the last step {averager.stats.ratio:.0f}")
    dist.destroy_process_group()
