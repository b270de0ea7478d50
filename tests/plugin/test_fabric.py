"""Fabric trains with the same averaging, on two ranks."""

import copy
import io
import re
import warnings
from contextlib import nullcontext

import lightning as L
import pytest
import torch
from features_kit import WORLD, apart, on_every_rank, spread, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_gradcomp as lgc
from lightning_gradcomp.averaging import mean_state
from tests.processes import on_ranks

QUICK = {"min_elements": 32, "warmup_epochs": 0}
METHODS = {
    "dgc": lgc.DGC(sparsity=0.9, dense_epochs=0, **QUICK),
    "onebit": lgc.OneBit(**QUICK),
    "terngrad": lgc.TernGrad(error_feedback=True, **QUICK),
    "ddp": None,
}


class Two(nn.Module):
    """A body and a head, each with an optimizer of its own where there are two."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, images):
        return self.head(self.body(images).relu())


class Run:
    """A model, set up, that trains on batches which depend on rank and step alone."""

    def __init__(self, method, model=Two, **options):
        method = METHODS.get(method, method) if isinstance(method, str) else method
        topology = {"topology": "all_gather"} | options
        strategy = "ddp" if method is None else lgc.CompressedFabricStrategy(method, **topology)
        self.fabric = L.Fabric(strategy=strategy, accelerator="cpu", devices=WORLD)
        self.fabric.launch()
        self.fabric.seed_everything(0, verbose=False)
        self.bare, self.steps = model(), 0
        self.sgd = torch.optim.SGD(self.bare.parameters(), lr=0.05, momentum=0.9)
        self.model, self.optimizer = self.fabric.setup(self.bare, self.sgd)
        self.state = {"model": self.model, "optimizer": self.optimizer, "steps": 0}

    def loss(self, number):
        generator = torch.Generator().manual_seed(100 * number + self.fabric.global_rank)
        images = torch.randn(16, 64, generator=generator)
        return nn.functional.cross_entropy(self.model(images), (images.mean(1) * 20 + 5).long().clamp(0, 9))

    def train(self, steps, then=lambda: None):
        losses = []
        for _ in range(steps):
            for half in range(2):
                with self.fabric.no_backward_sync(self.model, enabled=half == 0):
                    loss = self.loss(2 * self.steps + half)
                    self.fabric.backward(loss)
            then()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.steps += 1
            losses.append(loss.item())
        return losses

    def weights(self):
        return weights(self.bare)


@on_ranks(2)
def test_fabric_trains():
    run, losses = Run(lgc.DGC(dense_epochs=1, warmup_epochs=4)), []
    for epoch in range(7):
        run.fabric.strategy.set_epoch(epoch)
        losses += run.train(5)
    averager = run.fabric.strategy.averager
    assert (averager.stats.sparsity, averager.steps) == (pytest.approx(0.996), 35)
    assert run.sgd.param_groups[0]["momentum"] == 0.9
    assert spread(run.weights()) == 0
    assert sum(losses[-5:]) < sum(losses[:5])


# Checkpoints


@pytest.mark.parametrize("method", METHODS)
@on_ranks(2)
def test_fabric_goes_on_from_a_checkpoint(method, tmp_path):
    """Of step 6 to step 12, loaded before and after a step."""
    straight, path = Run(method), tmp_path / "six.ckpt"
    straight.train(6)
    straight.fabric.save(path, straight.state)
    straight.train(6)
    for steps_before in (0, 3):
        run = Run(method)
        run.train(steps_before)
        assert not run.fabric.load(path, run.state)
        run.steps = 6
        run.train(6)
        assert apart(run.weights(), straight.weights()) == 0


@on_ranks(2)
def test_fabric_forgets_what_is_not_in_a_checkpoint(tmp_path):
    fresh, again, path = Run("dgc"), Run("dgc"), tmp_path / "fresh.ckpt"
    fresh.fabric.save(path, fresh.state)  # nothing is remembered yet
    fresh.train(2)
    again.train(3)
    again.fabric.load(path, again.state)
    again.steps = 0
    again.train(2)
    assert apart(again.weights(), fresh.weights()) == 0


def saved(run, path):
    run.fabric.save(path, run.state)
    return torch.load(path, weights_only=True)


@on_ranks(2)
def test_fabric_saves_what_it_has_just_loaded_and_warns_of_what_it_does_not_restore(tmp_path):
    run, again = Run("dgc"), Run("dgc")
    run.train(3)
    first = saved(run, tmp_path / "first.ckpt")
    again.fabric.load(tmp_path / "first.ckpt", again.state)
    second = saved(again, tmp_path / "again.ckpt")
    for rank, other in zip(*(each["lightning_gradcomp"]["ranks"] for each in (first, second)), strict=True):
        velocity = rank["memory"]["velocity"]
        assert all(torch.equal(part, other["memory"]["velocity"][name]) for name, part in velocity.items())
    assert first["optimizer"]["state"].keys() == second["optimizer"]["state"].keys()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Run("dgc").fabric.load(tmp_path / "first.ckpt")
    [said, _] = on_every_rank([str(each.message) for each in caught])
    assert any("the checkpoint holds the ranks' residuals" in each for each in said)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The path of one that two ranks have saved."""
    path = tmp_path_factory.mktemp("fabric") / "dgc.ckpt"
    save(path=path)
    return path


@on_ranks(2)
def save(path):
    run = Run("dgc")
    run.train(3)
    run.fabric.save(path, run.state)


def test_fabric_on_one_rank_starts_with_the_mean(checkpoint):
    strategy = lgc.CompressedFabricStrategy(lgc.DGC(sparsity=0.9, min_elements=32, dense_epochs=0, warmup_epochs=0))
    fabric = L.Fabric(strategy=strategy, accelerator="cpu", devices=1)
    model = Two()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    fabric.launch()
    wrapped, optimizer = fabric.setup(model, sgd)
    fabric.load(checkpoint, {"model": wrapped, "optimizer": optimizer})
    fabric.backward(sum(parameter.sum() for parameter in model.parameters()), model=wrapped)
    ranks = torch.load(checkpoint, weights_only=True)["lightning_gradcomp"]["ranks"]
    expected, got = mean_state(ranks)["memory"]["velocity"], strategy.averager.state_dict()["memory"]["velocity"]
    assert expected["body.weight"].any() and all(torch.equal(got[name], part) for name, part in expected.items())
    torch.distributed.destroy_process_group()


# Optimizers


@pytest.mark.parametrize("name", ["onebit", "ddp_dense"])
def test_fabric_warns_of_an_optimizer_that_was_set_up_before_its_module(name):
    fabric = L.Fabric(strategy=name, accelerator="cpu", devices=1)
    fabric.launch()
    module = torch.nn.Linear(4, 2)
    warned = pytest.warns(UserWarning, match="no parameter of a module that is set up, so OneBit does not compress its")
    with warned if name == "onebit" else nullcontext():
        fabric.setup_optimizers(torch.optim.SGD(module.parameters(), lr=0.1))
    fabric.setup_module(module)
    torch.distributed.destroy_process_group()


@on_ranks(2)
def test_fabric_clips_the_average():
    ours, stock, unclipped, onebit, dgc = (Run(name) for name in ("none", "ddp", "ddp", "onebit", "dgc"))
    for run in (ours, stock):
        run.train(3, lambda run=run: run.fabric.clip_gradients(run.model, run.optimizer, max_norm=0.01))
    unclipped.train(3)
    assert apart(ours.weights(), stock.weights()) == 0 < apart(stock.weights(), unclipped.weights())
    onebit.train(3, lambda: onebit.fabric.clip_gradients(onebit.model, onebit.optimizer, clip_val=0.001))
    assert spread(onebit.weights()) == 0
    message = r"clipping with DGC in Fabric: got 'fabric.clip_gradients', allowed: DGC\(clip_norm="
    with pytest.raises(ValueError, match=message):
        dgc.train(1, lambda: dgc.fabric.clip_gradients(dgc.model, dgc.optimizer, max_norm=1.0))


@on_ranks(2)
def test_fabric_discarded_gradients_stay_discarded():
    """The head's own loss is 0; the gradients that the body's leaves on it are discarded."""
    run = Run("onebit")
    parts = run.bare.body, run.bare.head
    body, head = (run.fabric.setup_optimizers(torch.optim.SGD(part.parameters(), lr=0.1)) for part in parts)
    before = [part.weight.clone() for part in parts]
    for number in range(4):
        for optimizer, factor in ((body, 1), (head, 0)):
            optimizer.zero_grad()
            run.fabric.backward(factor * run.loss(number))
            optimizer.step()
    assert [torch.equal(part.weight, old) for part, old in zip(parts, before, strict=True)] == [False, True]
    assert spread(run.weights()) == 0


class Wrapped(torch.optim.Optimizer):
    """Steps another optimizer, and does not call `Optimizer.__init__`."""

    def __init__(self, base):
        self.base, self.param_groups, self.defaults, self.state = base, base.param_groups, base.defaults, base.state

    def step(self, closure=None):
        return self.base.step(closure)

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)


@on_ranks(2)
def test_fabric_takes_an_optimizer_without_torchs_hooks():
    """Set up after the first step, instead of the one that it wraps. Error feedback is committed by its steps too."""
    trained = []
    for wrap in (Wrapped, lambda optimizer: optimizer):
        run = Run("onebit")
        run.train(1)
        run.optimizer = run.fabric.setup_optimizers(wrap(torch.optim.SGD(run.bare.parameters(), lr=0.05)))
        run.train(3)
        trained.append(run.weights())
        assert run.fabric.strategy.averager.steps == 4
    assert apart(*trained) == spread(trained[0]) == 0


@on_ranks(2)
def test_fabric_averages_after_backward():
    """The optimizer's own step uses the averages, unless another optimizer has some of its parameters."""
    run = Run("onebit")
    run.fabric.backward(run.loss(0))
    assert spread(torch.cat([p.grad.reshape(-1) for p in run.bare.parameters()])) == 0
    run.sgd.step()
    assert spread(run.weights()) == 0
    run.fabric.setup_optimizers(torch.optim.SGD(run.bare.body.parameters(), lr=0.1))
    run.fabric.backward(run.loss(1))
    with pytest.raises(ValueError, match=r"optimizer: got .*SGD.*, allowed: the optimizer that fabric.setup returns"):
        run.sgd.step()


# Several modules


class Pair:
    """Two modules with an optimizer each. The first one's loss leaves gradients on the second one, as in a GAN."""

    def __init__(self, method):
        self.one = Run(method)
        torch.manual_seed(1)
        self.bare = nn.Linear(10, 64)
        sgd = torch.optim.SGD(self.bare.parameters(), lr=0.05, momentum=0.9)
        self.model, self.optimizer = self.one.fabric.setup(self.bare, sgd)
        self.state = {**self.one.state, "other": self.model, "other_optimizer": self.optimizer}

    def train(self, steps):
        one = self.one
        for _ in range(steps):
            generator = torch.Generator().manual_seed(10 * one.steps + one.fabric.global_rank)
            images = torch.randn(16, 64, generator=generator)
            for optimizer, sign in ((one.optimizer, 1), (self.optimizer, -1)):
                optimizer.zero_grad()
                logits = one.model(images) if sign == 1 else one.model(images).detach()
                one.fabric.backward(sign * (self.model(logits) - images).square().mean())
                optimizer.step()
            one.steps += 1

    def weights(self):
        return torch.cat([self.one.weights(), weights(self.bare)])


@on_ranks(2)
def test_fabric_trains_several_modules_as_ddp():
    ours, stock = Pair("none"), Pair("ddp")
    for pair in (ours, stock):
        pair.train(3)
    assert apart(ours.weights(), stock.weights()) == 0


@pytest.mark.parametrize("method", ["onebit", "dgc"])
@on_ranks(2)
def test_each_modules_residuals_are_in_checkpoints(method, tmp_path):
    """Also if optimizers are loaded one by one."""
    straight, path = Pair(method), tmp_path / "pair.ckpt"
    straight.train(3)
    straight.one.fabric.save(path, straight.state)
    straight.train(3)
    whole, parts = Pair(method), Pair(method)
    whole.train(1)
    whole.one.fabric.load(path, whole.state)
    for keys in (("model", "optimizer"), ("other", "other_optimizer")):
        parts.one.fabric.load(path, {key: parts.state[key] for key in keys}, strict=False)
    for pair in (whole, parts):
        pair.one.steps = 3
        pair.train(3)
        assert apart(pair.weights(), straight.weights()) == 0
    assert spread(straight.weights()) == 0


@on_ranks(2)
def test_fabric_evaluates_a_second_model(tmp_path):
    """Set up after training, for a checkpoint, without an optimizer."""
    run = Run("dgc")
    run.train(2)
    run.fabric.save(tmp_path / "best.ckpt", run.state)
    best = run.fabric.setup(Two())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.fabric.load(tmp_path / "best.ckpt", {"model": best})
    assert apart(best(torch.ones(2, 64)), run.model(torch.ones(2, 64))) == 0
    run.model = best
    run.fabric.backward(run.loss(0))
    gradients = torch.cat([p.grad.reshape(-1) for p in best.parameters()])
    assert gradients.any() and spread(gradients) == 0


@pytest.mark.parametrize("method", ["none", "int8", "onebit"])
@on_ranks(2)
def test_a_model_in_training_can_be_copied(method):
    run, images, saved = Run(method), torch.ones(2, 64), io.BytesIO()
    run.train(2)
    torch.save(run.model._forward_module, saved)
    saved.seek(0)
    copies = [
        copy.deepcopy(run.model._forward_module),
        torch.optim.swa_utils.AveragedModel(run.model),
        torch.load(saved, weights_only=False),
    ]
    expected = run.model(images)
    assert [apart(model(images), expected) for model in copies] == [0, 0, 0]
    run.train(1)
    assert spread(run.weights()) == 0


class Private(Two):
    """With a layer that DDP is told to ignore."""

    def __init__(self):
        super().__init__()
        self.private = nn.Linear(64, 64, bias=False)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["private.weight"])

    def forward(self, images):
        return super().forward(self.private(images))


def trained_privately(method):
    """The shared weights. The ignored layer is replaced after the setup, and frozen in mid-run."""
    run = Run(method, model=Private)
    torch.manual_seed(2 + run.fabric.global_rank)
    run.bare.private = nn.Linear(64, 64, bias=False)
    run.train(2)
    run.bare.private.requires_grad_(False)
    run.train(2)
    return torch.cat([weights(run.bare.body), weights(run.bare.head)])


@pytest.mark.parametrize("method", ["none", "int8", "onebit"])
@on_ranks(2)
def test_what_ddp_ignores_may_be_replaced_and_frozen(method):
    trained = trained_privately(method)
    assert spread(trained) == 0
    assert method != "none" or apart(trained, trained_privately("ddp")) == 0


# What is refused


@pytest.mark.parametrize(
    ("method", "by_initial", "message"),
    [
        (
            "onebit",
            True,
            r"DDP's join\(\) with OneBit: got 'a backward inside it', allowed: the same number of batches",
        ),
        ("none", False, r"DDP's join\(divide_by_initial_world_size\): got False, allowed: True: a communication hook"),
    ],
)
@on_ranks(2)
def test_fabric_refuses_a_join(method, by_initial, message):
    run = Run(method)
    with run.model._forward_module.join(by_initial, throw_on_early_termination=True):
        with pytest.raises(ValueError, match=message):
            run.train(1)
        loss = run.loss(0)  # so that all ranks leave together
    del loss


@on_ranks(2)
def test_fabric_without_parameters_raises_what_ddp_raises():
    said = []
    for method in ("ddp", "onebit"):
        with pytest.raises(RuntimeError, match="doesn't have any parameter") as raised:
            Run(method).fabric.setup_module(nn.Flatten())
        said.append(re.sub(r"0x\w+", "", str(raised.value)))
    assert said[0] == said[1]
