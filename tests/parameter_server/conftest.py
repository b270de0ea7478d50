"""Servers and workers as threads of one process."""

import math
from datetime import timedelta

import pytest
import torch
from torch import nn

import lightning_gradcomp as lgc
from lightning_gradcomp.parameter_server.averager import AsyncAverager
from lightning_gradcomp.parameter_server.server import ParameterServer

SECRET = "word"
FP32 = {"dtype": torch.float32}
TIMEOUT = timedelta(seconds=20)


def net(seed=0):
    """Two matrices, which are compressed, and two biases."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(12, 10, **FP32), nn.Tanh(), nn.Linear(10, 6, **FP32))


class Odd(nn.Module):
    """As `net`, with a parameter that is a number (0-d), and one without elements."""

    def __init__(self, seed=0):
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 5))
        self.net = net(seed)
        self.scale = nn.Parameter(torch.tensor(1.0 + seed))
        self.nothing_more = nn.Parameter(torch.zeros(3, 0))

    def forward(self, x):
        return self.scale * self.net(x) + self.nothing.sum() + self.nothing_more.sum()


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **options})


def dropping():
    return lgc.GradientDropping(sparsity=0.9, min_elements=16, warmup_epochs=0)


def dgc():
    return lgc.DGC(sparsity=0.9, min_elements=16)


def int8():
    return lgc.Int8(min_elements=16)


def onebit():
    return lgc.OneBit(min_elements=16)


def loss(model, worker, step):
    generator = torch.Generator().manual_seed(1000 * worker + step)
    x, y = torch.randn(8, 12, generator=generator, **FP32), torch.randint(0, 6, (8,), generator=generator)
    return nn.functional.cross_entropy(model(x), y)


class Job:
    """Servers that begin with one model, and workers of them."""

    def __init__(
        self,
        compressor="none",
        servers=1,
        optimizer=sgd,
        staleness=math.inf,
        pull="fp32",
        silence=TIMEOUT,
        make_model=net,
        **options,
    ):
        self.compressor, self.optimizer, self.pull, self.workers = compressor, optimizer, pull, []
        self.make_model, model = make_model, make_model()
        self.servers = [
            ParameterServer(
                model,
                optimizer(model),
                compressor,
                secret=SECRET,
                partition=shard,
                servers=servers,
                staleness=staleness,
                pull=pull,
                timeout=silence,
                **options,
            )
            for shard in range(servers)
        ]
        for server in self.servers:
            server.start()

    def worker(self, seed=1):
        """A model with other weights, which the first pull replaces, and its averager."""
        model = self.make_model(seed)
        addresses = [server.address for server in self.servers]
        options = {"servers": addresses, "secret": SECRET, "pull": self.pull, "timeout": TIMEOUT}
        self.workers.append(AsyncAverager(model, self.optimizer(model), self.compressor, **options))
        return model, self.workers[-1]

    def weights(self):
        """Name -> copy of a weight, on its server."""
        return {name: p.detach().clone() for server in self.servers for name, p in server.partition.weights.items()}

    def stop(self):
        for worker in self.workers:
            worker.close()
        for server in self.servers:
            server.stop()
            server.join()  # a thread that outlives the test would log to its closed output


@pytest.fixture
def job():
    made = []

    def make(*arguments, **options):
        made.append(Job(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.stop()
