"""Runs on 4 ranks, two replicas of two shards each: `GradientAverager` with FSDP2. Prints outcomes as one JSON line."""

import json
import math
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_gradcomp.averaging import GradientAverager
from lightning_gradcomp.averaging.topology import traffic
from lightning_gradcomp.compressors import DGC, LossyCompressor, PowerSGD
from tests.averaging.laws import KEPT, REGISTERED, REMEMBERING, quick, with_defaults
from tests.averaging.workers import same, seeded
from tests.compressors.examples import registered

dist.init_process_group("gloo")
RANK = dist.get_rank()
MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
REPLICAS = MESH.get_group("replicate")
SHAPES = {"kernel": (9, 4, 3, 3), "matrix": (12, 25), "row": (1, 60), "small": (3, 3), "bias": (10,)}
"""Uneven shards, one that is empty on every second rank, and two tensors that are not compressed."""
LR = 0.1
BF16_INSIDE = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Table(nn.Module):
    """Parameters and no layers; the loss is linear in each of them."""

    def __init__(self, names=SHAPES):
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.randn(SHAPES[name], generator=seeded(len(name)))))

    def forward(self, slopes):
        return sum((parameter * slopes[name]).sum() for name, parameter in self.named_parameters())


def slopes(rank, step):
    """Heavy-tailed gradients of every parameter."""
    generator = seeded(rank, step)
    noise = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: n * n.abs() for name, n in noise.items()}


def sharded(model=None, mesh=None):
    return fully_shard(model or Table(), mesh=mesh or MESH["shard"])


def averager_of(model, compressor, make=None, **options):
    optimizer = (make or sgd)(model.parameters())
    return optimizer, GradientAverager(model, compressor, optimizer=optimizer, process_group=REPLICAS, **options)


def sgd(parameters, momentum=0.0):
    return torch.optim.SGD(parameters, lr=LR, momentum=momentum)


def with_momentum(parameters):
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9, nesterov=True, weight_decay=0.01)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def backward(model, optimizer, step):
    optimizer.zero_grad()
    model(slopes(RANK, step)).backward()


def local(model):
    """Name -> this rank's shard."""
    return {name: parameter.to_local().detach().clone() for name, parameter in model.named_parameters()}


def whole(model):
    return torch.cat([parameter.full_tensor().detach().reshape(-1) for parameter in model.parameters()])


def apart(a, b):
    """The largest difference on any rank."""
    largest = max([float((a[name].double() - b[name].double()).abs().max()) for name in a if a[name].numel()])
    everyone = torch.tensor([largest])
    dist.all_reduce(everyone, op=dist.ReduceOp.MAX)
    return everyone.item()


def replicas_apart(model):
    other = {name: part.clone() for name, part in local(model).items()}
    for part in other.values():
        if part.numel():
            dist.broadcast(part, group=REPLICAS, group_src=0)
    return apart(local(model), other)


def conserved(make):
    """Applied + the mean of what replicas remember, against the sum of the mean gradients; replicas."""
    model = sharded()
    optimizer, averager = averager_of(model, make())
    start, expected = local(model), {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}
    for step in range(6):
        backward(model, optimizer, step)
        averager.step()
        for name in expected:
            expected[name] += sum(slopes(rank, step)[name].double() for rank in range(4)) / 4
    memory = averager.state_dict()["memory"]
    [kept] = [memory[kind] for kind in KEPT if kind in memory]
    total = {}
    for name, now in local(model).items():
        waits = kept.get(name, torch.zeros_like(now))
        if waits.numel():
            dist.all_reduce(waits, group=REPLICAS)
        total[name] = (start[name] - now) / LR + waits / 2
    own = {
        name: list(part.chunk(2))[MESH.get_local_rank("shard")] if len(part) > 1 else part
        for name, part in expected.items()
    }
    own = {name: own[name] if total[name].numel() else total[name] for name in own}
    return apart(total, own), replicas_apart(model), any(bool(part.any()) for part in kept.values())


def as_plain(make, make_optimizer):
    """A sharded model's step, against that of a plain model whose parameters are a rank's shards.

    These are too small by themselves for a PowerSGD of rank 4, its default. All are compressed, because Adam's ρ comes
    from the uncompressed tensors of all shards.
    """
    compressor, names = make(), ("kernel", "matrix", "row")
    lossy = isinstance(compressor, LossyCompressor)
    model = sharded(Table([name for name in names if not lossy or compressor.compresses(name, SHAPES[name])]))
    parts = {name: part for name, part in local(model).items() if part.numel()}
    plain = Table(())
    for name, part in parts.items():
        plain.register_parameter(name, nn.Parameter(part.clone()))
    pairs = [averager_of(one, make(), make_optimizer) for one in (model, plain)]
    named = dict(model.named_parameters())
    for step in range(4):
        with pairs[0][1].local_weights(), pairs[1][1].local_weights():
            backward(model, pairs[0][0], step)
        for name, parameter in plain.named_parameters():
            parameter.grad = named[name].grad.to_local().clone()
        for _, averager in pairs:
            averager.step()
    expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    got = {name: part for name, part in local(model).items() if name in expected}
    states = [averager.state_dict()["memory"] for _, averager in pairs]
    return apart(got, expected), bool(same(*states))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 17), nn.Tanh(), nn.Linear(17, 6), nn.Tanh(), nn.Linear(6, 1))


def like_fsdp(make_optimizer, *, layers=False, backwards=1, clip=None, policy=None, steps=15):
    """FSDP2's own HSDP against the averager without compression; with `layers`, each is sharded by itself."""
    options, results = {"mp_policy": policy} if policy else {}, []
    for mesh in (MESH, MESH["shard"]):
        model = net()
        for layer in [module for module in model if layers and isinstance(module, nn.Linear)]:
            fully_shard(layer, mesh=mesh, **options)
        model = fully_shard(model, mesh=mesh, **options)
        optimizer = make_optimizer(model.parameters())
        if mesh is not MESH:
            averager = GradientAverager(model, "none", optimizer=optimizer, process_group=REPLICAS)
        for step in range(steps):
            optimizer.zero_grad()
            for part in range(backwards):
                generator = seeded(RANK, step, part)
                x, y = torch.randn(8, 12, generator=generator), torch.randn(8, 1, generator=generator)
                ((model(x).float() - y).square().mean() / backwards).backward()
            if mesh is not MESH:
                averager.average()
                averager.commit()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        results.append(whole(model))
    return float((results[0] - results[1]).abs().max())


def not_finite(make_optimizer, value):
    """What ranks see, and remember, of a value on one rank alone."""
    model = sharded()
    optimizer, averager = averager_of(model, dgc(), make_optimizer)
    for step in range(3):
        backward(model, optimizer, step)
        averager.step()
    before, weights = averager.state_dict()["memory"], local(model)
    backward(model, optimizer, 3)
    if RANK == 1:
        dict(model.named_parameters())["matrix"].grad.to_local().view(-1)[3] = value
    averager.average()
    averager.commit()
    gradients = [parameter.grad.to_local() for parameter in model.parameters()]
    seen = all(not gradient.isfinite().any() for gradient in gradients if gradient.numel())
    alike = same(before, averager.state_dict()["memory"])
    return everywhere(seen and alike and apart(weights, local(model)) == 0)


def dgc(**options):
    return DGC(**{"sparsity": 0.9, "warmup_epochs": 0, "dense_epochs": 0, "min_elements": 40, **options})


def everywhere(claim):
    count = torch.tensor([float(claim)])
    dist.all_reduce(count)
    return count.item() == 4


def clipped():
    """Momentum correction clips at the norm over all shards of a replica."""
    model = sharded()
    optimizer, averager = averager_of(model, dgc(clip_norm=1.0, sparsity=0.5, values="fp32"), sgd)
    backward(model, optimizer, 0)
    gradients = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}
    squares = sum(part.square().sum() for part in gradients.values())
    dist.all_reduce(squares, group=MESH.get_group("shard"))
    averager.average()
    averager.commit()
    kept = averager.state_dict()["memory"]["velocity"]
    factor = 2**0.5 / squares.sqrt()
    # What this rank has kept of its gradient is the gradient itself, clipped by the norm of the whole.
    off = max(
        float((part - gradients[name] * factor)[part != 0].abs().max()) for name, part in kept.items() if part.any()
    )
    return everywhere(off < 1e-6)


def phases():
    """Dense, sparse, dense: momentum goes into the optimizer and out of it."""
    model = sharded()
    optimizer, averager = averager_of(model, dgc(), with_momentum)
    averager.schedule = lambda epoch, step: 0.9 if 2 <= step < 5 else 0.0
    held = []
    for step in range(7):
        backward(model, optimizer, step)
        averager.step()
        state = optimizer.state[dict(model.named_parameters())["matrix"]]
        held.append(type(state.get("momentum_buffer")).__name__)
    return held, replicas_apart(model)


def sent_bytes():
    model = sharded()
    optimizer, averager = averager_of(model, dgc())
    backward(model, optimizer, 0)
    averager.step()
    expected = traffic(averager.compressor.with_sparsity(0.9), averager.gradients, averager.ranks, "all_gather")
    return [averager.stats.bytes_sent, expected, averager.stats.dense_bytes]


def refused():
    half = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(half[0], mesh=MESH["shard"])
    small_head = nn.Sequential(nn.Linear(40, 40, bias=False), nn.Linear(40, 1, bias=False))
    small_head[0].requires_grad_(False)
    cases = {
        "frozen": lambda: averager_of(sharded(small_head), dgc()),
        "powersgd": lambda: averager_of(
            sharded(), PowerSGD(min_elements=40, warmup_epochs=0, min_compression=1, rank=8)
        ),
        "topology": lambda: averager_of(sharded(), "onebit", topology="two_phase"),
        "inside": lambda: averager_of(sharded(), "onebit", inside="dense"),
        "both dimensions": lambda: averager_of(sharded(mesh=MESH), "onebit"),
        "half": lambda: averager_of(half, "onebit"),
        "world": lambda: GradientAverager(sharded(), "onebit", process_group=dist.group.WORLD),
        "no group": lambda: GradientAverager(sharded(), "onebit"),
    }
    said = {}
    for name, case in cases.items():
        try:
            case()
            said[name] = "taken"
        except ValueError as error:
            said[name] = str(error)
    return said


with registered():
    found = {
        "like_fsdp": {
            "sgd, clipped": like_fsdp(with_momentum, clip=0.05),
            "adamw, accumulated": like_fsdp(adamw, backwards=2),
            "layers, bf16 inside": like_fsdp(with_momentum, layers=True, policy=BF16_INSIDE, steps=20),
        },
        "conserved": {name: conserved(make) for name, make in with_defaults(REMEMBERING).items()},
        "as_plain": {
            f"{name}, {make_optimizer.__name__}": as_plain(make, make_optimizer)
            for name, make in (with_defaults(REGISTERED) | {"powersgd": partial(quick, PowerSGD, rank=1)}).items()
            for make_optimizer in (with_momentum, adamw)
        },
        "not_finite": [not_finite(make, value) for make in (sgd, adamw) for value in (math.inf, math.nan)],
        "clipped": clipped(),
        "phases": phases(),
        "sent_bytes": sent_bytes(),
        "refused": refused(),
    }
print(json.dumps(found))
dist.destroy_process_group()
