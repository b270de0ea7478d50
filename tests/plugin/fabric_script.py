"""Runs on every rank of a world: Fabric trainings. Prints the outcomes as one JSON line.

usage: fabric_script.py FOLDER
"""

import copy
import io
import json
import os
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_gradcomp as lgc

FOLDER, WORLD = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
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


def weights(module):
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def apart(a, b):
    """Largest difference between two vectors, over all ranks."""
    difference = (a - b).abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return difference.item()


def spread(vector):
    """Largest difference to rank 0's."""
    first = vector.clone()
    dist.broadcast(first, 0)
    return apart(vector, first)


def raised(action, *arguments, **options):
    try:
        action(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def trains():
    run, losses = Run(lgc.DGC(dense_epochs=1, warmup_epochs=4)), []
    for epoch in range(7):
        run.fabric.strategy.set_epoch(epoch)
        losses += run.train(5)
    averager = run.fabric.strategy.averager
    return {
        "sparsity": averager.stats.sparsity, "steps": averager.steps, "momentum": run.sgd.param_groups[0]["momentum"],
        "spread": spread(run.weights()), "learned": sum(losses[-5:]) < sum(losses[:5]),
    }  # fmt: skip


def goes_on():
    """How far runs that load a checkpoint of step 6 are from the straight run at step 12; before and after a step."""
    result = {}
    for name in METHODS:
        straight, path = Run(name), FOLDER / f"{name}.ckpt"
        straight.train(6)
        straight.fabric.save(path, straight.state)
        straight.train(6)
        result[name] = []
        for steps_before in (0, 3):
            run = Run(name)
            run.train(steps_before)
            rest = run.fabric.load(path, run.state)
            assert not rest, rest.keys()
            run.steps = 6
            run.train(6)
            result[name].append(apart(run.weights(), straight.weights()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Run("dgc").fabric.load(FOLDER / "dgc.ckpt")
    fresh = Run("dgc")
    fresh.fabric.save(FOLDER / "fresh.ckpt", fresh.state)  # nothing is remembered yet
    fresh.train(2)
    again = Run("dgc")
    again.train(3)
    again.fabric.load(FOLDER / "fresh.ckpt", again.state)
    again.steps = 0
    again.train(2)
    result["from the start"] = apart(again.weights(), fresh.weights())
    return {**result, "warned": [str(warning.message) for warning in caught], "saved_again": saved_again()}


def saved_again():
    """Whether a checkpoint that is saved as soon as it was loaded holds what the ranks remember, and the momentum."""
    run, again = Run("dgc"), FOLDER / "again.ckpt"
    run.fabric.load(FOLDER / "dgc.ckpt", run.state)
    run.fabric.save(again, run.state)
    first, second = (torch.load(path, weights_only=True) for path in (FOLDER / "dgc.ckpt", again))
    remembered = (saved["lightning_gradcomp"]["ranks"] for saved in (first, second))
    same = all(
        torch.equal(part, other["memory"]["velocity"][name])
        for rank, other in zip(*remembered, strict=True)
        for name, part in rank["memory"]["velocity"].items()
    )
    return same and first["optimizer"]["state"].keys() == second["optimizer"]["state"].keys()


def clipping():
    """What DGC says; and how far clipped averages of a baseline are from DDP's, and from those that aren't clipped."""
    ours, stock, unclipped = Run("none"), Run("ddp"), Run("ddp")
    for run in (ours, stock):
        run.train(3, lambda run=run: run.fabric.clip_gradients(run.model, run.optimizer, max_norm=0.01))
    unclipped.train(3)
    dgc, onebit = Run("dgc"), Run("onebit")
    onebit.train(3, lambda: onebit.fabric.clip_gradients(onebit.model, onebit.optimizer, clip_val=0.001))
    return {
        "dgc": raised(dgc.train, 1, lambda: dgc.fabric.clip_gradients(dgc.model, dgc.optimizer, max_norm=1.0)),
        "apart": apart(ours.weights(), stock.weights()),
        "clipped": apart(stock.weights(), unclipped.weights()),
        "spread": spread(onebit.weights()),
    }


def two_optimizers():
    """The head's own loss is 0; the gradients that the body's leaves on it are discarded. How far both have moved."""
    run = Run("onebit")
    parts = run.bare.body, run.bare.head
    body, head = (run.fabric.setup_optimizers(torch.optim.SGD(part.parameters(), lr=0.1)) for part in parts)
    before = run.bare.body.weight.clone(), run.bare.head.weight.clone()
    for number in range(4):
        for optimizer, factor in ((body, 1), (head, 0)):
            optimizer.zero_grad()
            run.fabric.backward(factor * run.loss(number))
            optimizer.step()
    now = run.bare.body.weight, run.bare.head.weight
    moved = [(a - b).abs().max().item() for a, b in zip(now, before, strict=True)]
    return {"moved": moved, "spread": spread(run.weights())}


class Wrapped(torch.optim.Optimizer):
    """Steps another optimizer, and does not call `Optimizer.__init__`."""

    def __init__(self, base):
        self.base, self.param_groups, self.defaults, self.state = base, base.param_groups, base.defaults, base.state

    def step(self, closure=None):
        return self.base.step(closure)

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)


def wrapped_optimizer():
    """Set up after the first step, instead of the one that it wraps: how far it is from that one."""
    results = []
    for wrap in (Wrapped, lambda optimizer: optimizer):
        run = Run("onebit")
        run.train(1)
        run.optimizer = run.fabric.setup_optimizers(wrap(torch.optim.SGD(run.bare.parameters(), lr=0.05)))
        run.train(3)
        results.append((run.weights(), run.fabric.strategy.averager.steps))
    [(one, steps), (other, same_steps)] = results
    return {"apart": apart(one, other), "spread": spread(one), "steps": [steps, same_steps]}


def after_backward():
    """How far the ranks' gradients are from each other after a backward, and their weights after the optimizer's own
    step. And what that raises if another optimizer has some of its parameters."""
    run = Run("onebit")
    run.fabric.backward(run.loss(0))
    gradients = torch.cat([p.grad.reshape(-1) for p in run.bare.parameters()])
    run.sgd.step()
    found = [spread(gradients), spread(run.weights())]
    run.fabric.setup_optimizers(torch.optim.SGD(run.bare.body.parameters(), lr=0.1))
    run.fabric.backward(run.loss(1))
    return {"apart": found, "several": raised(run.sgd.step)}


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


def several_modules():
    """How far two modules without compression are from DDP's; and with it, ranks from each other, and a resumed run
    from the straight one, also if its optimizers are loaded one by one."""
    ours, stock = Pair("none"), Pair("ddp")
    for pair in (ours, stock):
        pair.train(3)
    found = {"apart": apart(ours.weights(), stock.weights()), "resumed": {}}
    for name in ("onebit", "dgc"):
        straight, path = Pair(name), FOLDER / f"pair {name}.ckpt"
        straight.train(3)
        straight.one.fabric.save(path, straight.state)
        straight.train(3)
        whole, parts = Pair(name), Pair(name)
        whole.train(1)
        whole.one.fabric.load(path, whole.state)
        for keys in (("model", "optimizer"), ("other", "other_optimizer")):
            parts.one.fabric.load(path, {key: parts.state[key] for key in keys}, strict=False)
        for pair in (whole, parts):
            pair.one.steps = 3
            pair.train(3)
        found["resumed"][name] = [apart(pair.weights(), straight.weights()) for pair in (whole, parts)]
        found[name] = spread(straight.weights())
    return found


def evaluates():
    """A second model for a checkpoint, set up after training: how far its output is from the first one's, and warnings.
    And how far the ranks' gradients of it are from each other, without an optimizer."""
    run = Run("dgc")
    run.train(2)
    run.fabric.save(FOLDER / "best.ckpt", run.state)
    best = run.fabric.setup(Two())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fabric.load(FOLDER / "best.ckpt", {"model": best})
    images = torch.ones(2, 64)
    found = {"apart": apart(best(images), run.model(images)), "warned": [str(each.message) for each in caught]}
    run.model = best
    run.fabric.backward(run.loss(0))
    gradients = torch.cat([p.grad.reshape(-1) for p in best.parameters()])
    return {**found, "gradients_apart": spread(gradients), "moved": bool(gradients.any())}


def copies():
    """How far outputs of copies of a model in training are from the model's, and the first weights of a saved copy."""
    found = {}
    for name in ("none", "int8", "onebit"):
        run, images = Run(name), torch.ones(2, 64)
        run.train(2)
        copied = copy.deepcopy(run.model._forward_module), torch.optim.swa_utils.AveragedModel(run.model)
        saved = io.BytesIO()
        torch.save(run.model._forward_module, saved)
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)
        expected = run.model(images)
        found[name] = [apart(model(images), expected) for model in (*copied, loaded)]
        run.train(1)
        found[name].append(spread(run.weights()))
    return found


class Private(Two):
    """With a layer that DDP is told to ignore."""

    def __init__(self):
        super().__init__()
        self.private = nn.Linear(64, 64, bias=False)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, ["private.weight"])

    def forward(self, images):
        return super().forward(self.private(images))


def ignored_parameters():
    """An ignored layer is replaced after the setup, and frozen in mid-run. How far the weights are from DDP's."""
    found = {}
    for name in ("none", "int8", "onebit"):
        trained = []
        for method in (name, "ddp") if name == "none" else (name,):
            run = Run(method, model=Private)
            torch.manual_seed(2 + run.fabric.global_rank)
            run.bare.private = nn.Linear(64, 64, bias=False)
            run.train(2)
            run.bare.private.requires_grad_(False)
            run.train(2)
            trained.append(torch.cat([weights(run.bare.body), weights(run.bare.head)]))
        found[name] = [spread(trained[0]), apart(trained[0], trained[-1])]
    return found


def joins():
    """What is raised inside DDP's join()."""
    said = {}
    for method, by_initial in (("onebit", True), (lgc.NoCompression(), False)):
        run = Run(method)
        with run.model._forward_module.join(by_initial, throw_on_early_termination=True):
            said[type(run.fabric.strategy.compressor).__name__] = raised(run.train, 1)
            loss = run.loss(0)  # so that all ranks leave together
        del loss
    return said


def without_parameters():
    """What is raised where there is nothing to train."""
    return {method: raised(Run(method).fabric.setup_module, nn.Flatten()) for method in ("ddp", "onebit")}


if __name__ == "__main__":
    parts = (
        trains, goes_on, clipping, two_optimizers, wrapped_optimizer, after_backward, several_modules, evaluates,
        copies, ignored_parameters, joins, without_parameters,
    )  # fmt: skip
    outcome = {part.__name__: part() for part in parts}
    if os.environ["RANK"] == "0":
        print(json.dumps(outcome))
