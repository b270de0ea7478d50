"""A parameter server and its workers, each on a host of its own: a small network on scikit-learn's digits, DGC.

export SECRET=...  # the same word on all hosts
python docs/examples/parameter_server.py server 10.0.0.1:29600 [epochs]  # on the host with this address
python docs/examples/parameter_server.py worker 10.0.0.1:29600 [epochs]  # then on the others, whenever you like
"""

import itertools
import os
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import lightning_gradcomp as lgc

WORKERS = 2  # learning rates are divided by this number: as many pushes are a step. Any number of workers may join.
SAME = {"compressor": "dgc", "pull": "int8", "secret": os.environ["SECRET"]}  # formats of pushes and pulls


def network():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


if __name__ == "__main__":
    role, address, epochs = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 8
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    split = torch.Generator().manual_seed(0)  # the same on all hosts
    train, val = random_split(TensorDataset(images, torch.tensor(labels)), [1437, 360], split)
    loader = DataLoader(train, 32, shuffle=True, drop_last=True)  # each worker draws from all images
    pushes = epochs * len(loader)
    if role == "server":
        host, port = address.rsplit(":", 1)
        server = lgc.ParameterServer(model, optimizer, host=host, port=int(port), **SAME)
        server.start()  # threads that step the optimizer at each push
        print(f"serving {pushes} pushes at {server.address}", flush=True)
        while server.partition.version < pushes:
            time.sleep(0.1)
        server.stop()
        server.join()  # until the workers have left
        sys.exit()
    worker = lgc.AsyncAverager(model, optimizer, servers=[address], world=WORKERS, **SAME)
    for images, labels in (batch for _ in itertools.count() for batch in loader):
        if worker.version >= pushes:  # of all workers
            break
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        worker.step()  # pushes the gradient, and pulls the weights
    worker.pull()  # whole weights, as the server has them
    worker.close()
    images, labels = next(iter(DataLoader(val, len(val))))
    accuracy = (model(images).argmax(1) == labels).float().mean()
    print(f"accuracy {accuracy:.1%}, ratio of the last step {worker.stats.ratio:.0f}")
