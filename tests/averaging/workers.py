"""Small models, each rank's own data, and the loops that train them: with the averager, and with DDP to compare."""

from __future__ import annotations

import math
from contextlib import contextmanager
from functools import cache

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gradcomp.app.muon import MuonAdamW
from lightning_gradcomp.averaging import GradientAverager
from lightning_gradcomp.averaging.exchange import CALLER_FLAGS
from lightning_gradcomp.compressors import DGC

SGD = {"lr": 0.02, "momentum": 0.9}


def seeded(*numbers):
    """A generator of its own for these numbers: ranks are threads and must not share torch's global one."""
    seed = 0
    for number in numbers:
        seed = 1000 * seed + number + 1
    return torch.Generator().manual_seed(seed)


def filled(model, seed=0):
    """`model` with weights that depend on the seed alone."""
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + (parameter.dim() == 1))
    return model


def conv_net():
    """Convolution, batch norm, linear: 1494 parameters, of which 216 + 1152 in two tensors that are compressed."""
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 9)]
    return filled(nn.Sequential(*layers))


def images(rank, step):
    """A batch that no other rank and no other step has."""
    generator = seeded(rank, step)
    return torch.randn(4, 3, 6, 6, generator=generator), torch.randint(0, 9, (4,), generator=generator)


def image_loss(model, rank, step):
    x, y = images(rank, step)
    return nn.functional.cross_entropy(model(x), y)


class Table(nn.Module):
    """Parameters of all kinds and no layers; its output is linear in each of them."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(10, 4, 3, 3))
        self.matrix = nn.Parameter(torch.empty(12, 25))
        self.small = nn.Parameter(torch.empty(3, 3))
        self.bias = nn.Parameter(torch.empty(10))
        filled(self)

    def forward(self, kernel, matrix, small, bias):
        slopes = (kernel, matrix, small, bias)
        return sum((parameter * slope).sum() for parameter, slope in zip(self.parameters(), slopes, strict=True))


SHAPES = [tuple(parameter.shape) for parameter in Table().parameters()]


@cache
def slopes(rank, step):
    """Heavy-tailed numbers for every parameter of a Table."""
    generator = seeded(rank, step)
    noise = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [n * n.abs() for n in noise]


def prescribed_loss(model, rank, step):
    """For a Table: gradients that do not depend on the weights, different for each rank and step."""
    return model(*slopes(rank, step))


@cache
def bowl(name, shape, rank, step):
    """(curvature, target) of every element, from 0.05 to 3 and from a heavy-tailed distribution."""
    number = ["kernel", "matrix", "small", "bias"].index(name)
    curvature = 0.05 * 60 ** torch.rand(shape, generator=seeded(number))
    target = torch.randn(shape, generator=seeded(number, rank, step))
    return curvature, target * target.abs() * 3


def bowl_loss(model, rank, step):
    """For a Table: a quadratic bowl around targets of this rank and step; the gradient needs no sum over elements."""
    total = 0
    for name, parameter in model.named_parameters():
        curvature, target = bowl(name, parameter.shape, rank, step)
        total = total + 0.5 * (curvature * (parameter - target) ** 2).sum()
    return total


def bowl_gradient(weights, rank, step):
    """Its gradient, in numpy, from name -> weight."""
    gradient = {}
    for name, weight in weights.items():
        curvature, target = bowl(name, weight.shape, rank, step)
        gradient[name] = curvature.numpy() * (weight - target.numpy())
    return gradient


def dgc(**options):
    """DGC for small tensors, without warm-up."""
    return DGC(**{"sparsity": 0.9, "values": "fp32", "min_elements": 50, **options})


HAS_MUON = hasattr(torch.optim, "Muon")
"""torch 2.8 lacks it."""


def muon_adamw(parameters):
    """Muon for matrices, AdamW for everything else."""
    groups = {"muon": [], "adamw": []}
    for parameter in parameters:
        groups["muon" if parameter.dim() == 2 else "adamw"].append(parameter)
    return MuonAdamW([{"rule": rule, "params": each} for rule, each in groups.items()], lr=0.01)


OWN_OPTIONS = ("topology", "inside", "fallback", "ranks_per_node", "steps_per_epoch", "epoch")


def averaged(model, group, compressor=None, schedule=None, **options):
    """An optimizer and an averager for `model`; `options` of either."""
    own = {key: options.pop(key) for key in OWN_OPTIONS if key in options}
    optimizer = torch.optim.SGD(model.parameters(), **{**SGD, **options})
    averager = GradientAverager(model, compressor or dgc(), optimizer=optimizer, process_group=group, **own)
    averager.schedule = schedule or averager.schedule
    return optimizer, averager


def backward(model, optimizer, rank, step, loss=image_loss):
    """The gradients of one step."""
    optimizer.zero_grad()
    loss(model, rank, step).backward()


def train(model, optimizer, averager, rank, steps, loss=image_loss, scheduler=None):
    """`steps` steps with the averager."""
    for step in steps if isinstance(steps, range) else range(steps):
        backward(model, optimizer, rank, step, loss)
        averager.step()
        if scheduler:
            scheduler.step()


def flag_bytes(parts):
    """What the flags add to each of `parts` messages of a `Table` in few bits: 4 tensors, 19 elements in fp32."""
    return 4 * math.ceil((19 + 4 + CALLER_FLAGS) / parts) - 4 * math.ceil(19 / parts)


def flat_gradients(model):
    """The gradients of a Table's compressed parameters: a copy."""
    return torch.cat([model.kernel.grad.reshape(-1), model.matrix.grad.reshape(-1)])


def recorded(model, optimizer, averager, rank, steps):
    """(its gradient, the average) of a Table at every step, and the state at the end."""
    seen = []
    for step in range(steps):
        backward(model, optimizer, rank, step, prescribed_loss)
        own = flat_gradients(model)
        averager.average()
        averager.commit()
        seen.append((own, flat_gradients(model)))
    return seen, averager.state_dict()["memory"]


def train_ddp(model, optimizer, group, rank, steps, loss=image_loss, scheduler=None, **options):
    """The same with DDP, which the averager stands in for."""
    wrapped = DistributedDataParallel(model, process_group=group, **options)
    for step in range(steps):
        backward(wrapped, optimizer, rank, step, loss)
        optimizer.step()
        if scheduler:
            scheduler.step()


def weights(model):
    """All parameters in one fp32 vector."""
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


def same(state, other):
    """Whether two states are equal to the bit, names included."""
    return state.keys() == other.keys() and all(
        state[key].keys() == other[key].keys() and all(torch.equal(state[key][n], other[key][n]) for n in state[key])
        for key in state
    )


def all_equal(results):
    """Whether all ranks hold the same tensor to the bit."""
    return all(torch.equal(result, results[0]) for result in results)


@contextmanager
def default_dtype(dtype):
    """Inside, tensors are of this type where nobody says another: for all threads."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
