"""Runs on both ranks: trainings whose hooks, module or optimizer meddle with a step. Prints one JSON line.

usage: step_script.py FOLDER
"""

import copy

import lightning as L
import torch
from features_kit import (
    FOLDER,
    RANK,
    WORLD,
    Manual,
    Net,
    dgc,
    examples,
    forced,
    loader,
    on_every_rank,
    onebit,
    raised,
    run,
    spread,
    trainer_for,
)
from features_kit import apart as apart_of
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from moving_average import Averaging
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import lightning_gradcomp as lgc
from lightning_gradcomp.averaging.fsdp.shards import local

DATA = examples().tensors


class Adam(Net):
    """Weight decay would move what is to stay."""

    weight_decay = 0.0

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=self.weight_decay)


class Sharded(Net):
    def configure_model(self):
        for layer in self.children():
            if not isinstance(layer, FSDPModule):
                fully_shard(layer, mesh=self.device_mesh["shard"])


class ShardedAdam(Sharded, Adam):
    pass


def two_phase(**options):
    return onebit(topology="two_phase", **options)


def powersgd(**options):
    return forced(lgc.PowerSGD(min_elements=32, warmup_epochs=0, rank=1), verify_replicas_every_n_steps=1, **options)


def unverified(**options):
    return forced(dgc().compressor, **options)


def hsdp(**options):
    return lgc.CompressedHSDPStrategy(dgc().compressor, 2, 1, verify_replicas_every_n_steps=1, **options)


AUTOMATIC = {"dgc sgd": (dgc, Net), "onebit sgd": (onebit, Net), "onebit adamw": (onebit, Adam)}
"""One for each thing that error feedback accumulates: SGD's momentum, the gradient, Adam's step."""
EVERY = {
    **AUTOMATIC, "two_phase adamw": (two_phase, Adam), "manual dgc": (dgc, Manual), "hsdp adamw": (hsdp, ShardedAdam),
}  # fmt: skip
METHODS = {
    **EVERY, "ddp sgd": (DDPStrategy, Net), "ddp adamw": (DDPStrategy, Adam),
    "powersgd adamw": (powersgd, Adam),
    "unverified sgd": (unverified, Net), "unverified adamw": (unverified, Adam),
}  # fmt: skip
FEW = ("dgc sgd", "onebit adamw", "hsdp adamw")
UNUSED = {"find_unused_parameters": True}


class At:
    """Calls `act` in the hook whose name is `at`."""

    at = ""

    def act(self):
        pass

    def reached(self, place):
        if place == self.at:
            self.act()

    def on_train_batch_start(self, *args):
        self.reached("on_train_batch_start")

    def training_step(self, *args):
        self.reached("training_step")
        return super().training_step(*args)

    def on_before_zero_grad(self, *args):
        self.reached("on_before_zero_grad")

    def on_before_backward(self, *args):
        self.reached("on_before_backward")

    def on_after_backward(self):
        self.reached("on_after_backward")

    def on_before_optimizer_step(self, *args):
        self.reached("on_before_optimizer_step")

    def optimizer_step(self, *args):
        super().optimizer_step(*args)
        self.reached("optimizer_step")

    def on_train_batch_end(self, *args):
        self.reached("on_train_batch_end")


def fit(
    method, mixin=At, *, strategy=None, callbacks=(), ckpt_path=None, batches=6, epochs=1, trainer=None, validate=False,
    **attributes,
):  # fmt: skip
    """Train from the same weights; returns the module, whose class has `attributes`.

    Args:
        method: one of `METHODS`.
        mixin: what the module does beside training.
        strategy: options of the strategy.
        callbacks: of the Trainer, as ckpt_path, batches an epoch and epochs are.
        trainer: its other options.
        validate: True to validate after each epoch.
    """
    make_strategy, base = METHODS[method]
    L.seed_everything(0, verbose=False)
    net = type(mixin.__name__, (mixin, base), attributes)()
    made = trainer_for(make_strategy(**(strategy or {})), epochs=epochs, callbacks=list(callbacks), **(trainer or {}))
    made.fit(net, loader(batches), loader(1) if validate else None, ckpt_path=ckpt_path)
    return net


def weights(module):
    return torch.cat([local(parameter).detach().reshape(-1) for parameter in module.parameters()])


def distance(a, b):
    return float((a - b).norm())


def apart(a, b):
    """Largest difference between the weights of two modules, over all ranks."""
    return apart_of(weights(a), weights(b))


def replicas_apart(module):
    return spread(weights(module))


# Gradients: filled, discarded, written to


class Filling(At):
    """A layer that nothing runs through gets zeros for gradients, as every gradient that is None."""

    weight_decay = 0.1

    def __init__(self):
        super().__init__()
        self.idle = nn.Linear(8, 8)

    def act(self):
        for parameter in self.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


AFTER_BACKWARD = [(method, "on_after_backward") for method in ("dgc sgd", "onebit adamw")]
BEFORE_STEP = [(method, "on_before_optimizer_step") for method in EVERY]


def filled_gradients():
    """[replicas apart, the idle layer from where DDP has moved it]."""
    ddp = {name: fit(f"ddp {name}", Filling, at="on_after_backward", strategy=UNUSED).idle for name in ("sgd", "adamw")}
    found = {}
    for method, hook in AFTER_BACKWARD + BEFORE_STEP:
        net = fit(method, Filling, at=hook, strategy={} if "hsdp" in method else UNUSED)
        idle = ddp["adamw" if "adamw" in method else "sgd"]
        found[f"{method} {hook}"] = [replicas_apart(net), apart(net.idle, idle)]
    return found


class Late(At):
    """The head is frozen in the first epoch: its gradients are discarded."""

    how, first_step, jump, moved = "", 0.0, 0.0, 0.0

    def act(self):
        for parameter in self.head.parameters() if self.current_epoch == 0 else ():
            if self.how == "none":
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def on_train_batch_start(self, batch, index):
        super().on_train_batch_start(batch, index)
        self.before = weights(self.head)

    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)
        moved = distance(weights(self.head), self.before)
        if self.global_step == 1:
            self.first_step = moved
        if self.current_epoch == 0:
            self.moved = max(self.moved, moved)
        elif not self.jump:
            self.jump = moved


def discarded_gradients():
    """[largest move while frozen, the first step afterwards in steps of a run that is never frozen, replicas apart]."""
    first = {method: fit(method, Late, batches=1).first_step for method in EVERY}
    found = {}
    for places, how in ((AFTER_BACKWARD, "none"), (BEFORE_STEP, "zero")):
        for method, hook in places:
            net = fit(method, Late, at=hook, how=how, epochs=2)
            found[f"{method} {hook} {how}"] = [net.moved, net.jump / first[method], replicas_apart(net)]
    return found


class Silencing(At):
    """Gradients become zero by means that torch doesn't count."""

    at, how = "on_before_optimizer_step", ""

    def act(self):
        for parameter in self.parameters():
            if self.how == "data":
                parameter.grad.data.mul_(0)
            elif self.how == "numpy":
                parameter.grad.numpy()[:] = 0
            else:
                parameter.grad.data = torch.zeros_like(parameter.grad)


def written_gradients():
    """How far the weights have moved."""
    start = fit("ddp sgd", batches=0)
    cases = [(method, "data") for method in EVERY]
    cases += [(method, how) for method in ("dgc sgd", "onebit adamw") for how in ("numpy", "exchanged")]
    return {f"{method} {how}": apart(fit(method, Silencing, how=how), start) for method, how in cases}


# Steps: left out, interrupted, saved in their midst


class LeavingOut(At):
    """Every other batch has no step."""

    moved = 0.0

    def optimizer_step(self, epoch, index, optimizer, closure):
        closure() if index % 2 else optimizer.step(closure)

    def on_train_batch_start(self, batch, index):
        self.before = weights(self)

    def on_train_batch_end(self, outputs, batch, index):
        if index % 2:
            self.moved = max(self.moved, distance(weights(self), self.before))


class LeavingOutByHand(LeavingOut):
    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(Net.training_step(self, batch, index))
        if not index % 2:
            optimizer.step()


def left_out_steps():
    """[largest move in a batch without a step, steps that count, replicas apart]."""
    found = {}
    for method in EVERY:
        net = fit(method, LeavingOutByHand if "manual" in method else LeavingOut)
        found[method] = [net.moved, net.trainer.strategy.averager.steps, replicas_apart(net)]
    return found


class Saving(At):
    """Saves before its fourth step. What a batch holds depends on the step alone."""

    path = ""

    def training_step(self, batch, index):
        begin = 8 * (WORLD * self.global_step + RANK)
        return super().training_step([part[begin : begin + 8] for part in DATA], index)

    def act(self):
        if self.path and self.global_step == 3:
            self.trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, *args):
        if self.global_step == 3:
            self.after_three = {name: local(each).clone() for name, each in self.state_dict().items()}


def saved_in_a_step():
    """[saved weights from those of the step before, saved step, a resumed run from the straight one]."""
    found = {}
    for method, place in [*BEFORE_STEP, ("dgc sgd", "on_before_backward"), ("onebit adamw", "training_step")]:
        path = FOLDER / f"{method} {place}.ckpt"
        net = fit(method, Saving, at=place, path=path)
        resumed, off, step = fit(method, Saving, ckpt_path=path), 0.0, 3
        if path.is_file():
            saved = torch.load(path, weights_only=True)
            off, step = (
                max(apart_of(saved["state_dict"][k], each) for k, each in net.after_three.items()),
                saved["global_step"],
            )
        found[f"{method} {place}"] = [off, step, apart(net, resumed)]
    return found


class Raising(At):
    """An error in the fourth step, on both ranks."""

    def act(self):
        if self.global_step == 3:
            raise ArithmeticError("in the fourth step")

    def on_train_batch_end(self, *args):
        if self.global_step == 3:
            self.after_three = weights(self)


class WithoutLoss(Raising):
    """Lightning raises an error where training_step returns None on several ranks."""

    def training_step(self, *args):
        loss = super().training_step(*args)
        return None if self.global_step == 3 else loss


def interrupted_steps():
    """[what was raised, weights from those of the step before, replicas apart]."""
    found = {}
    for method in FEW:
        cases = [(Raising, at) for at in ("training_step", "on_before_backward", "on_after_backward")]
        for mixin, at in [*cases, (WithoutLoss, "")]:
            nets = []
            said = raised(fit, method, mixin, at=at, setup=lambda self, stage, nets=nets: nets.append(self))
            [net] = nets
            found[f"{method} {mixin.__name__} {at}"] = [
                said, apart_of(weights(net), net.after_three), replicas_apart(net)
            ]  # fmt: skip
    return found


# Optimizers: with hooks, replaced, in part, wrapped


class Clamping(At):
    """An optimizer's hook after the step clamps the weights."""

    largest = 0.0

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: [each.data.clamp_(-0.02, 0.02) for each in self.parameters()])
        return optimizer

    def on_train_batch_end(self, *args):
        self.largest = max(self.largest, float(weights(self).abs().max()))


def post_step_hooks():
    """[largest weight after a batch, replicas apart]."""
    found = {method: fit(method, Clamping) for method in EVERY}
    return {method: [net.largest, replicas_apart(net)] for method, net in found.items()}


class Switch(Callback):
    """After the first epoch, another optimizer or other moments."""

    def __init__(self, how, make=None):
        self.how, self.make = how, make

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 0:
            return
        [optimizer] = trainer.optimizers
        module.before = weights(module)
        if self.how == "new":
            make = self.make or (lambda parameters: module.configure_optimizers())
            trainer.strategy.optimizers = [make(module.parameters())]
        elif self.how == "clear":
            optimizer.state.clear()
        for state in optimizer.state.values():
            for name in {"exp_avg", "exp_avg_sq", "momentum_buffer"} & set(state):
                if self.how == "zero":
                    state[name].zero_()
                elif self.how == "replace":
                    state[name] = torch.zeros_like(state[name])


def switched(method, how, make=None):
    return fit(method, callbacks=[Switch(how, make)], epochs=2, batches=4)


def other_moments():
    """[from the run that keeps its moments; replaced from zeroed; cleared from a new optimizer; replicas apart]."""
    found = {}
    for method in FEW:
        nets = {how: switched(method, how) for how in ("", "zero", "replace", "clear", "new")}
        kept = min(apart(nets[how], nets[""]) for how in nets if how)
        pairs = [apart(nets["zero"], nets["replace"]), apart(nets["clear"], nets["new"])]
        found[method] = [kept, *pairs, max(map(replicas_apart, nets.values()))]
    return found


def other_optimizers():
    """What another class raises, or what it came to; and the move with a learning rate of 0."""
    found = {}
    for method in AUTOMATIC:
        same, other = torch.optim.SGD, torch.optim.AdamW
        if method.endswith("adamw"):
            same, other = other, same
        still = switched(method, "new", lambda parameters, same=same: same(parameters, lr=0.0))
        found[method] = {
            "moved": apart_of(weights(still), still.before),
            "other": raised(switched, method, "new", lambda parameters, other=other: other(parameters, lr=0.01)),
        }
    net = switched("onebit sgd", "new", lambda parameters: torch.optim.RMSprop(parameters, lr=0.01))
    return {**found, "rmsprop": [replicas_apart(net), apart_of(weights(net), net.before)]}


class Nesterov(At):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        if isinstance(optimizer, torch.optim.SGD):
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1)
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class Raw(Nesterov):
    """Steps torch's own optimizer, as Lightning's documentation shows."""

    with_closure = True

    def optimizer_step(self, epoch, index, optimizer, closure):
        if self.with_closure:
            optimizer.optimizer.step(closure)
        else:
            closure()
            optimizer.optimizer.step()


def torchs_own_optimizer():
    """How far from the normal run, with the closure given to the optimizer and called before."""
    found = {}
    for method in FEW:
        normal = fit(method, Nesterov)
        found[method] = [apart(fit(method, Raw, with_closure=closure), normal) for closure in (True, False)]
    return found


class HeadOnly(At):
    """The optimizer has the head alone. In the second batch a gradient of the body is huge, or NaN."""

    frozen, bad = False, 1.0

    def __init__(self):
        super().__init__()
        self.body.requires_grad_(not self.frozen)

    def training_step(self, batch, index):
        if index == 1 and not self.frozen:
            self.body.weight.register_hook(lambda gradient: gradient * self.bad)
        return super().training_step(batch, index)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return type(optimizer)(self.head.parameters(), lr=0.05)


def optimizer_of_a_part():
    """How far the head is from that of a frozen body; the rest of the body's gradient."""
    found = {}
    for method in AUTOMATIC:
        for clip, bad in ((None, torch.nan), (0.05, 1e20)):
            trainer = {"gradient_clip_val": clip}
            frozen = fit(method, HeadOnly, frozen=True, trainer=trainer, batches=4)
            net = fit(method, HeadOnly, bad=bad, trainer=trainer, batches=4)
            found[f"{method} {clip} {bad}"] = [apart(net.head, frozen.head), float(net.body.weight.grad.abs().max())]
    return found


class Lookahead(torch.optim.Optimizer):
    """Slow weights every third step. As in many repositories, `Optimizer.__init__` is not called."""

    def __init__(self, base):
        self.base, self.param_groups, self.defaults, self.state = base, base.param_groups, base.defaults, {}
        self.steps = 0

    def step(self, closure=None):
        loss = self.base.step(closure)
        self.steps += 1
        for group in self.param_groups if self.steps % 3 == 0 else ():
            for parameter in group["params"]:
                slow = self.state.setdefault(parameter, {"slow": parameter.detach().clone()})["slow"]
                slow.lerp_(parameter.detach(), 0.5)
                parameter.data.copy_(slow)
        return loss

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, state_dict):
        self.base.load_state_dict(state_dict)

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)


class Duck:
    """Has an optimizer's methods, no more."""

    def __init__(self, base):
        self.base, self.param_groups, self.defaults, self.state = base, base.param_groups, base.defaults, base.state

    state_dict, load_state_dict, zero_grad = Lookahead.state_dict, Lookahead.load_state_dict, Lookahead.zero_grad

    def step(self, closure=None):
        return self.base.step(closure)


class Wrapped(At):
    wrap = None

    def configure_optimizers(self):
        return self.wrap(super().configure_optimizers())


def loss(net):
    x, y = examples(6).tensors
    return nn.functional.mse_loss(net(x), y).item()


def wrapped_optimizers():
    """Replicas apart, steps, whether something is remembered, and the loss, as a part of that of the start."""
    found, start = {}, loss(fit("ddp sgd", batches=0))
    for method in ("onebit sgd", "powersgd adamw"):
        for wrap in (Lookahead, Duck):
            net = fit(method, Wrapped, wrap=wrap, epochs=2)
            averager = net.trainer.strategy.averager
            found[f"{method} {wrap.__name__}"] = {
                "replicas_apart": replicas_apart(net),
                "steps": averager.steps,
                "remembers": averager.has_unsent,
                "loss": loss(net) / start,
            }
    found["as the optimizer itself"] = apart(fit("onebit sgd", Wrapped, wrap=Duck), fit("onebit sgd"))
    return found


class WarmUp(At):
    """The optimizer is made beforehand; its warm-up begins at a tenth."""

    def __init__(self):
        super().__init__()
        self.made, self.calls, self.rates = super().configure_optimizers(), 0, []

    def configure_optimizers(self):
        self.calls += 1
        scheduler = torch.optim.lr_scheduler.LinearLR(self.made, start_factor=0.1, total_iters=9)
        return {"optimizer": self.made, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_start(self, *args):
        self.rates.append(self.made.param_groups[0]["lr"])


def prebuilt_optimizers():
    """Calls of configure_optimizers, and the learning rates."""
    nets = {method: fit(method, WarmUp) for method in AUTOMATIC}
    return {method: [net.calls, net.rates] for method, net in nets.items()}


# Weights that the module writes, layers that are its own


class Unit(At):
    """Normalises the rows of the head, by `.data` as WGANs clamp."""

    def act(self):
        rows = local(self.head.weight.data)
        rows.copy_(nn.functional.normalize(rows, dim=1))


def rows(net):
    """[largest difference of a row's norm from 1, replicas apart]."""
    norms = local(net.head.weight).detach().norm(dim=1)
    return [float((norms - 1).abs().max()), replicas_apart(net)]


DURING = ("training_step", "on_before_zero_grad")
AROUND = ("on_train_batch_start", "optimizer_step", "on_train_batch_end")


def written_weights():
    """Writes around local weights; during them; and at those moments where there are none.

    FSDP2 gives the module weights of its own between forward and backward, whose changes it forgets.
    """
    during = [(method, at) for method in ("dgc sgd", "onebit adamw") for at in DURING]
    during += [("hsdp adamw", "training_step")]
    without = [(method, at, {"local_weights": False}) for method, at in during]
    without += [("onebit sgd", at, {}) for at in DURING] + [("manual dgc", "training_step", {})]
    return {
        "around": {f"{method} {at}": rows(fit(method, Unit, at=at)) for method in FEW for at in AROUND},
        "during": {f"{method} {at}": raised(fit, method, Unit, at=at) for method, at in during},
        "without": {f"{method} {at}": rows(fit(method, Unit, at=at, strategy=o)) for method, at, o in without},
    }


class Expert(At):
    """A layer that DDP is told to leave alone: each rank has its own."""

    def __init__(self):
        super().__init__()
        self.expert = nn.Linear(32, 32, bias=False)
        nn.init.constant_(self.expert.weight, 0.01 * (RANK + 1))
        self.begin = weights(self.expert)
        self._ddp_params_and_buffers_to_ignore = ["expert.weight"]

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return self.head(hidden + self.expert(hidden))


def ignored_parameters():
    """Replicas apart in the rest; on every rank: the move of its expert, and its mean from that of the start."""
    found = {}
    for method in AUTOMATIC:
        net = fit(method, Expert)
        now = weights(net.expert)
        seen = [float((now - net.begin).abs().max()), float((now - net.begin).mean().abs())]
        found[method] = [max(replicas_apart(net.body), replicas_apart(net.head)), on_every_rank(seen)]
    return found


class FrozenOnOneRank(At):
    def on_train_batch_start(self, batch, index):
        self.body.requires_grad_(RANK == 0 or index < 3)


def frozen_on_one_rank():
    return {method: raised(fit, method, FrozenOnOneRank, strategy=UNUSED) for method in AUTOMATIC}


class MadeInSetup(At):
    def __init__(self):
        super().__init__()
        self.head = None

    def setup(self, stage):
        self.head = nn.Linear(32, 4)


def layers_made_in_setup():
    """[what was raised, names of what is remembered], where a pattern fits the new layer, and where it fits none."""
    quick, found = {"min_elements": 32, "warmup_epochs": 0}, {}
    for pattern in ("head.*", "tail.*"):
        dgc = lgc.DGC(sparsity=0.9, dense_epochs=0, **quick, exclude=[pattern])
        for compressor in (dgc, lgc.OneBit(**quick, exclude=[pattern])):
            strategy, net = forced(compressor), type("Net", (MadeInSetup, Net), {})()
            said = raised(trainer_for(strategy, epochs=1).fit, net, loader(3))
            kinds = strategy.averager.state_dict()["memory"] if strategy.averager else {}
            names = sorted({name for parts in kinds.values() for name in parts})
            found[f"{type(compressor).__name__} {pattern}"] = [said, names]
    return found


class Observed(At):
    """A batch norm and an observer of activations, as for quantisation: their buffers follow each rank's data."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        hidden = self.norm(self.body(x))
        self.largest.copy_(hidden.detach().max())
        return self.head(torch.tanh(hidden))


def buffers_of_data():
    return {method: raised(fit, method, Observed) for method in AUTOMATIC}


class Taught(At):
    """With a frozen copy of the head, which follows it in the hook `at`, from one step on."""

    since = 0

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)

    @torch.no_grad()
    def act(self):
        if self.global_step >= self.since:
            for mean, new in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
                local(mean).lerp_(local(new), 0.5)


def teachers():
    """What is raised where the teacher follows local weights, early or late; how far the others' replicas are apart."""
    inside = [(method, at) for method in ("dgc sgd", "onebit adamw") for at in DURING]
    inside += [("hsdp adamw", "on_before_zero_grad")]
    late = [("sgd", "training_step"), ("adamw", "on_before_zero_grad")]
    outside = [(method, at, {}) for method, at in zip(FEW, AROUND, strict=True)]
    outside += [("onebit sgd", "training_step", {}), ("manual dgc", "training_step", {})]
    outside += [(method, at, {"local_weights": False}) for method, at in inside[-2:]]
    return {
        "inside": {f"{method} {at}": raised(fit, method, Taught, at=at) for method, at in inside},
        "late": {at: raised(fit, f"unverified {optimizer}", Taught, at=at, since=5) for optimizer, at in late},
        "outside": {f"{m} {at} {o}": replicas_apart(fit(m, Taught, at=at, strategy=o)) for m, at, o in outside},
    }


class Spectral(At):
    """A layer with spectral norm, whose buffers follow the weights in each forward pass."""

    seen = 0.0

    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.head)

    def validation_step(self, batch, index):
        self.seen = max(self.seen, spread(torch.cat([each.reshape(-1) for each in self.buffers()])))


class Normed(At):
    """Batch norm, and a callback's moving average of the model with its statistics."""

    seen = 0.0

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.body(x))))

    def configure_callbacks(self):
        self.averaging = Averaging()
        return [self.averaging]

    def validation_step(self, batch, index):
        self.seen = self.averaging.differs


def validated_buffers():
    """Largest differences between ranks at validations and after the fit, and that of the replicas."""
    cases = [*((method, Spectral) for method in EVERY), *((method, Normed) for method in AUTOMATIC)]
    found = {}
    for method, mixin in cases:
        net = fit(method, mixin, epochs=3, validate=True)
        buffers = torch.cat([each.float().reshape(-1) for each in net.buffers()])
        found[f"{method} {mixin.__name__}"] = [net.seen, spread(buffers), replicas_apart(net)]
    return found


# Fabric, where the loop is the user's


def fabric():
    """[move in a batch without a step, move of a head whose gradients are discarded, replicas apart]."""
    found = {}
    for method in AUTOMATIC:
        strategy, base = METHODS[method]
        made = lgc.CompressedFabricStrategy(strategy().compressor, topology="all_gather")
        own = L.Fabric(strategy=made, accelerator="cpu", devices=WORLD)
        own.launch()
        own.seed_everything(0, verbose=False)
        bare = base()
        model, optimizer = own.setup(bare, bare.configure_optimizers())
        still = frozen = 0.0
        for step in range(12):
            begin = 8 * (WORLD * (step % 10) + RANK)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(DATA[0][begin : begin + 8]), DATA[1][begin : begin + 8])
            own.backward(loss)
            before, head = weights(bare), weights(bare.head)
            if step % 3 == 1:
                still = max(still, distance(weights(bare), before))
                continue
            if step % 3 == 2:
                bare.head.zero_grad()
            optimizer.step()
            if step % 3 == 2:
                frozen = max(frozen, distance(weights(bare.head), head))
        found[method] = [still, frozen, replicas_apart(bare), made.averager.steps]
    return found


if __name__ == "__main__":
    run((
        filled_gradients, discarded_gradients, written_gradients, left_out_steps, saved_in_a_step, interrupted_steps,
        post_step_hooks, other_moments, other_optimizers, torchs_own_optimizer, optimizer_of_a_part,
        wrapped_optimizers, prebuilt_optimizers, written_weights, ignored_parameters, frozen_on_one_rank,
        layers_made_in_setup, buffers_of_data, teachers, validated_buffers, fabric,
    ))  # fmt: skip
