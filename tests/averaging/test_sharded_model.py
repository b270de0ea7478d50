"""`GradientAverager` with FSDP2 on four ranks: two replicas of two shards each."""

import math
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_gradcomp.averaging import GradientAverager
from lightning_gradcomp.averaging.topology import traffic
from lightning_gradcomp.compressors import DGC, LossyCompressor, PowerSGD
from tests.averaging.methods import KEPT, REGISTERED, REMEMBERING, quick, with_defaults
from tests.averaging.workers import same, seeded
from tests.compressors.examples import registered
from tests.processes import on_ranks

SHAPES = {"kernel": (9, 4, 3, 3), "matrix": (12, 25), "row": (1, 60), "small": (3, 3), "bias": (10,)}
"""Uneven shards, one that is empty on every second rank, and two tensors that are not compressed."""
LR = 0.1


@cache
def mesh():
    """This rank's mesh."""
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


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


def sharded(model=None):
    return fully_shard(model or Table(), mesh=mesh()["shard"])


def averager_of(model, compressor, make=None, **options):
    optimizer = (make or sgd)(model.parameters())
    return optimizer, GradientAverager(
        model, compressor, optimizer=optimizer, process_group=mesh().get_group("replicate"), **options
    )


def sgd(parameters, momentum=0.0):
    return torch.optim.SGD(parameters, lr=LR, momentum=momentum)


def with_momentum(parameters):
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9, nesterov=True, weight_decay=0.01)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def backward(model, optimizer, step):
    optimizer.zero_grad()
    model(slopes(dist.get_rank(), step)).backward()


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
            dist.broadcast(part, group=mesh().get_group("replicate"), group_src=0)
    return apart(local(model), other)


def dgc(**options):
    return DGC(**{"sparsity": 0.9, "warmup_epochs": 0, "dense_epochs": 0, "min_elements": 40, **options})


@pytest.mark.parametrize("method", with_defaults(REMEMBERING))
@on_ranks(4)
def test_nothing_is_lost_on_any_shard_and_replicas_stay_equal(method):
    """Applied + the mean of what replicas remember = the sum of the mean gradients."""
    model = sharded()
    with registered():
        optimizer, averager = averager_of(model, REMEMBERING[method]())
    start, expected = local(model), {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}
    for step in range(6):
        backward(model, optimizer, step)
        averager.step()
        for name in expected:
            expected[name] += sum(slopes(rank, step)[name].double() for rank in range(4)) / 4
    memory = averager.state_dict()["memory"]
    [kept] = [memory[kind] for kind in KEPT if kind in memory]
    assert any(bool(part.any()) for part in kept.values())
    for name, now in local(model).items():
        if not now.numel():
            continue
        waits = kept.get(name, torch.zeros_like(now))
        dist.all_reduce(waits, group=mesh().get_group("replicate"))
        own = expected[name].chunk(2)[mesh().get_local_rank("shard")] if len(expected[name]) > 1 else expected[name]
        assert float(((start[name] - now) / LR + waits / 2 - own).abs().max()) <= 1e-5
    assert replicas_apart(model) == 0


RANK_1 = {"powersgd": partial(quick, PowerSGD, rank=1)}
"""Shards are too small by themselves for rank 4, the default."""


@pytest.mark.parametrize("make_optimizer", [with_momentum, adamw])
@pytest.mark.parametrize("method", with_defaults(REGISTERED))
@on_ranks(4)
def test_a_shard_is_averaged_as_a_plain_tensor_is(method, make_optimizer):
    """As a plain model whose parameters are a rank's shards.

    All are compressed, because Adam's ρ comes from the uncompressed tensors of all shards.
    """
    make = RANK_1.get(method, REGISTERED[method])
    compressor, names = make(), ("kernel", "matrix", "row")
    lossy = isinstance(compressor, LossyCompressor)
    model = sharded(Table([name for name in names if not lossy or compressor.compresses(name, SHAPES[name])]))
    plain = Table(())
    for name, part in local(model).items():
        if part.numel():
            plain.register_parameter(name, nn.Parameter(part))
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
    off = apart({name: part for name, part in local(model).items() if name in expected}, expected)
    # The draws of few bits depend on a shard's place in the whole model.
    most = {"int8": 0.1, "eden": 1.0}.get(method)
    assert off == 0 if most is None else 0 < off < most
    assert same(*(averager.state_dict()["memory"] for _, averager in pairs))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 17), nn.Tanh(), nn.Linear(17, 6), nn.Tanh(), nn.Linear(6, 1))


LIKE_FSDP = {
    "sgd, clipped": (with_momentum, {"clip": 0.05}),
    "adamw, accumulated": (adamw, {"backwards": 2}),
    "layers, bf16 inside": (with_momentum, {"policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
}


@pytest.mark.parametrize("how", LIKE_FSDP)
@on_ranks(4)
def test_without_compression_it_is_fsdps_own_hsdp(how):
    make_optimizer, how = LIKE_FSDP[how]
    backwards, policy, trained = how.get("backwards", 1), how.get("policy"), []
    options = {"mp_policy": policy} if policy else {}
    for by_fsdp in (True, False):
        model, shards = net(), mesh() if by_fsdp else mesh()["shard"]
        for layer in [module for module in model if policy and isinstance(module, nn.Linear)]:
            fully_shard(layer, mesh=shards, **options)
        model = fully_shard(model, mesh=shards, **options)
        optimizer = make_optimizer(model.parameters())
        if not by_fsdp:
            _, averager = averager_of(model, "none", lambda _, optimizer=optimizer: optimizer)
        for step in range(15):
            optimizer.zero_grad()
            for part in range(backwards):
                generator = seeded(dist.get_rank(), step, part)
                x, y = torch.randn(8, 12, generator=generator), torch.randn(8, 1, generator=generator)
                ((model(x).float() - y).square().mean() / backwards).backward()
            if not by_fsdp:
                averager.average()
                averager.commit()
            if "clip" in how:
                nn.utils.clip_grad_norm_(model.parameters(), how["clip"])
            optimizer.step()
        trained.append(torch.cat([parameter.full_tensor().detach().reshape(-1) for parameter in model.parameters()]))
    assert float((trained[0] - trained[1]).abs().max()) <= 1e-6


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@on_ranks(4)
def test_what_is_not_finite_on_one_rank_is_seen_on_all(make_optimizer, value):
    """And remembered on none."""
    model = sharded()
    optimizer, averager = averager_of(model, dgc(), make_optimizer)
    for step in range(3):
        backward(model, optimizer, step)
        averager.step()
    before, weights = averager.state_dict()["memory"], local(model)
    backward(model, optimizer, 3)
    if dist.get_rank() == 1:
        dict(model.named_parameters())["matrix"].grad.to_local().view(-1)[3] = value
    averager.average()
    averager.commit()
    assert not any(bool(parameter.grad.to_local().isfinite().any()) for parameter in model.parameters())
    assert same(before, averager.state_dict()["memory"])
    assert apart(weights, local(model)) == 0


@on_ranks(4)
def test_local_clipping_knows_the_norm_over_all_shards():
    """What this rank has kept of its gradient is the gradient itself, clipped by the norm of the whole."""
    model = sharded()
    optimizer, averager = averager_of(model, dgc(clip_norm=1.0, sparsity=0.5, values="fp32"), sgd)
    backward(model, optimizer, 0)
    gradients = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}
    squares = sum(part.square().sum() for part in gradients.values())
    dist.all_reduce(squares, group=mesh().get_group("shard"))
    averager.average()
    averager.commit()
    factor = 2**0.5 / squares.sqrt()
    for name, part in averager.state_dict()["memory"]["velocity"].items():
        assert not ((part - gradients[name] * factor)[part != 0].abs() >= 1e-6).any()


@on_ranks(4)
def test_the_optimizer_has_its_momentum_in_all_phases():
    """Dense, sparse, dense: momentum goes into the averager and out of it."""
    model = sharded()
    optimizer, averager = averager_of(model, dgc(), with_momentum)
    averager.schedule = lambda epoch, step: 0.9 if 2 <= step < 5 else 0.0
    for step in range(7):
        backward(model, optimizer, step)
        averager.step()
        state = optimizer.state[dict(model.named_parameters())["matrix"]]
        assert type(state.get("momentum_buffer")).__name__ == "DTensor"
    assert replicas_apart(model) == 0


@on_ranks(4)
def test_a_rank_sends_what_the_formula_says_of_its_shards():
    model = sharded()
    optimizer, averager = averager_of(model, dgc())
    backward(model, optimizer, 0)
    averager.step()
    expected = traffic(averager.compressor.with_sparsity(0.9), averager.gradients, averager.ranks, "all_gather")
    assert averager.stats.bytes_sent == expected < averager.stats.dense_bytes / 4


def with_a_frozen_layer():
    small_head = nn.Sequential(nn.Linear(40, 40, bias=False), nn.Linear(40, 1, bias=False))
    small_head[0].requires_grad_(False)
    return averager_of(sharded(small_head), dgc())


def with_half_a_model():
    half = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(half[0], mesh=mesh()["shard"])
    return averager_of(half, "onebit")


RANK_8 = PowerSGD(min_elements=40, warmup_epochs=0, min_compression=1, rank=8)
REFUSED = {
    "frozen": (with_a_frozen_layer, "a rank whose shards are all empty"),
    "powersgd": (lambda: averager_of(sharded(), RANK_8), "a shard of 'matrix' with 6"),
    "topology": (
        lambda: averager_of(sharded(), "onebit", topology="two_phase"), "got 'two_phase', allowed: 'all_gather'",
    ),
    "inside": (lambda: averager_of(sharded(), "onebit", inside="dense"), "got 'dense', allowed: 'compressed'"),
    "both dimensions": (
        lambda: averager_of(fully_shard(Table(), mesh=mesh()), "onebit"),
        r"got \"R, S\(0\) over \('replicate', 'shard'\)\"",
    ),
    "half": (with_half_a_model, "'1.weight': got 'a tensor that is not sharded"),
    "world": (
        lambda: GradientAverager(sharded(), "onebit", process_group=dist.group.WORLD),
        "got 'ranks that hold other shards of the same replica'",
    ),
    "no group": (
        lambda: GradientAverager(sharded(), "onebit"), "got None, allowed: that of the replicate dimension",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@on_ranks(4)
def test_what_shards_can_not_do_is_refused(case):
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        make()
