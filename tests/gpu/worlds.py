"""Steps of two ranks in one process without a process group, on any device; and what they are to be run with."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

import lightning_gradcomp as lgc
from lightning_gradcomp.averaging.exchange import Flags
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.memory import Memory
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.stats import Stats
from lightning_gradcomp.averaging.step import average_compressed
from lightning_gradcomp.averaging.topology import Topology
from lightning_gradcomp.compressors.kernels import rng
from lightning_gradcomp.compressors.kernels.rng import Uniform
from tests.averaging.workers import seeded

OPTIONS = {
    "dgc": [{"clip_norm": 1.0}, {"values": "int8", "dense_values": "int8"}, {"values": "bf16", "dense_values": "fp16"}],
    "gradient_dropping": [{"scope": "tensor", "values": "fp16", "dense_values": "bf16"}],
    "onebit": [{"threshold": "mean", "groups": "column"}],
    "twobit": [{"threshold": 0.5}],
    "powersgd": [{"warm_start": False, "rank": 1}],
    "terngrad": [{"error_feedback": True, "share_scaler": False}, {"clip_sigma": 0}],
}
CASES = [
    (entry.cls, options)
    for entry in lgc.entries()
    if issubclass(entry.cls, lgc.LossyCompressor)
    for options in [{}, *OPTIONS.get(entry.name, [])]
]
"""Every lossy compressor that is registered, with default options and others."""
NAMES = [f"{cls.__name__}-{'-'.join(map(str, options.values()))}".rstrip("-") for cls, options in CASES]
SHAPES = [(40, 60), (60,), (16, 8, 3, 3), (9, 120), (9,)]


class Model(torch.nn.Module):
    """Parameters without layers: three matrices that are compressed, two vectors that are not."""

    def __init__(self, device):
        super().__init__()
        weights = [torch.randn(shape, generator=seeded(99, *shape)) for shape in SHAPES]
        self.parts = torch.nn.ParameterList(part.to(device, non_blocking=True) for part in weights)

    def prescribe(self, rank, step):
        """Heavy-tailed gradients, the same on every device; the last vector has none on rank 1."""
        generator = seeded(rank, step)
        for part in self.parts:
            noise = torch.randn(part.shape, generator=generator)
            part.grad = (noise * noise.abs()).to(part.device, non_blocking=True)
        if rank == 1:
            self.parts[-1].grad = None


def no_sum(tensor, **options):
    """In place of `dist.all_reduce`."""


class Pair(Ranks):
    """One of two ranks that are threads. It is its own process group, for `sum_of_pair`."""

    def __init__(self, rank, table, together):
        super().__init__(None, world=2)
        self.rank = self.worker = rank
        self.table, self.together, self.group = table, together, self
        self.messages = []

    def both(self, tensor):
        self.table[self.rank] = tensor.clone()
        self.together.wait(60)
        everyones = list(self.table)
        self.together.wait(60)
        return torch.stack(everyones)

    def start_gather(self, message):
        self.messages.append(message.cpu())
        return lambda: self.both(message)

    def add(self, flat):
        return flat.copy_(self.both(flat).sum(0))


def sum_of_pair(tensor, group, op=dist.ReduceOp.SUM):
    """In place of `dist.all_reduce`."""
    both = group.both(tensor)
    tensor.copy_(both.amax(0) if op == dist.ReduceOp.MAX else both.sum(0))


class Steps:
    """The compressed steps of `model`, at a density of 0.1 where the compressor has one."""

    def __init__(self, model, compressor, ranks, topology=None, optimizer=None):
        self.topology, self.steps = topology or Topology(), 0
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        self.compressor = compressor
        self.state = Memory(compressor, Gradients(model, compressor), ranks, self.topology, optimizer)

    def average(self, grad_scale=1.0):
        compressor, self.steps = self.compressor.with_sparsity(0.9), self.steps + 1
        self.state.gradients.scale = grad_scale
        average = average_compressed(self.state, compressor, self.topology.name, self.steps, Flags(), Stats())
        if average.commit is not None:
            average.commit(average.names)


def train_pair(compressor, device, steps):
    """For each of two ranks: the averages (a flat tensor a step) and the messages, on the CPU."""
    table, together = [None, None], threading.Barrier(2)
    torch.linalg.qr(torch.eye(2, device=device))  # torch loads its solver for a GPU; not in two threads at once

    def work(rank):
        model, ranks = Model(device), Pair(rank, table, together)
        compressed, averages = Steps(model, compressor, ranks), []
        for step in range(steps):
            model.prescribe(rank, step)
            compressed.average()
            averages.append(torch.cat([part.grad.view(-1) for part in model.parts]).cpu())
        return averages, ranks.messages

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(work, range(2)))


class UniformOnCPU(Uniform):
    """Draws on the CPU for any device: a GPU would draw others."""

    def __init__(self, device, *key):
        super().__init__(torch.device("cpu"), *key)
        self.wanted = device

    def draw(self, n, begin):
        return super().draw(n, begin).to(self.wanted, non_blocking=True)


def draw_on_the_cpu(monkeypatch):
    """TernGrad's random numbers are the same on all devices."""
    monkeypatch.setattr(rng, "Uniform", UniformOnCPU)
