"""Hooks, modules and optimizers that meddle with a step, on two ranks."""

import copy
from functools import partial

import lightning as L
import pytest
import torch
from features_kit import (
    RANK,
    UNUSED,
    WORLD,
    Manual,
    Net,
    dgc,
    examples,
    forced,
    loader,
    onebit,
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
from tests.processes import on_ranks


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


def powersgd(**options):
    return forced(lgc.PowerSGD(min_elements=32, warmup_epochs=0, rank=1), verify_replicas_every_n_steps=1, **options)


def unverified(**options):
    return forced(dgc().compressor, **options)


def hsdp(**options):
    return lgc.CompressedHSDPStrategy(dgc().compressor, 2, 1, verify_replicas_every_n_steps=1, **options)


METHODS = {
    "dgc sgd": (dgc, Net), "onebit sgd": (onebit, Net), "onebit adamw": (onebit, Adam),
    "powersgd adamw": (powersgd, Adam), "hsdp adamw": (hsdp, ShardedAdam), "manual dgc": (dgc, Manual),
    "unverified sgd": (unverified, Net), "unverified adamw": (unverified, Adam),
    "ddp sgd": (DDPStrategy, Net), "ddp adamw": (DDPStrategy, Adam),
}  # fmt: skip
AUTOMATIC = ("dgc sgd", "onebit sgd", "onebit adamw")
"""One for each thing that error feedback accumulates: SGD's momentum, the gradient, Adam's step."""
FEW = ("dgc sgd", "onebit adamw", "hsdp adamw")
"""With momentum of its own, with the optimizer's moments, and sharded."""


def with_methods(methods):
    return pytest.mark.parametrize("method", methods)


def cases(*cases):
    """(method, place) each."""
    return pytest.mark.parametrize(("method", "at"), cases)


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
    """The gradients of an unused layer, which are None, become zeros."""

    weight_decay = 0.1

    def __init__(self):
        super().__init__()
        self.idle = nn.Linear(8, 8)

    def act(self):
        for parameter in self.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


AFTER_BACKWARD = [(method, "on_after_backward") for method in ("dgc sgd", "onebit adamw")]
BEFORE_STEP = [(method, "on_before_optimizer_step") for method in FEW]


@cases(*AFTER_BACKWARD, *BEFORE_STEP)
@on_ranks(2)
def test_filled_gradients_are_as_under_ddp(method, at):
    stock = fit(f"ddp {method.split()[1]}", Filling, at="on_after_backward", strategy=UNUSED)
    net = fit(method, Filling, at=at, strategy={} if "hsdp" in method else UNUSED)
    assert replicas_apart(net) == 0
    assert apart(net.idle, stock.idle) <= 1e-6


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


@pytest.mark.parametrize(("places", "how"), [(AFTER_BACKWARD, "none"), (BEFORE_STEP, "zero")], ids=["none", "zero"])
@on_ranks(2)
def test_a_layer_stays_while_its_gradients_are_discarded_and_goes_on_as_at_the_start(places, how):
    for method, at in places:
        first = fit(method, Late, batches=1).first_step
        net = fit(method, Late, at=at, how=how, epochs=2)
        assert net.moved == replicas_apart(net) == 0, method
        assert 0.4 < net.jump / first < 2.5, method


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


@pytest.mark.parametrize(
    ("method", "how"),
    [*((method, "data") for method in FEW), ("dgc sgd", "numpy"), ("onebit adamw", "exchanged")],
)
@on_ranks(2)
def test_zeros_written_past_torch_count(method, how):
    assert apart(fit(method, Silencing, how=how), fit("ddp sgd", batches=0)) == 0


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


@with_methods((*FEW, "manual dgc"))
@on_ranks(2)
def test_a_batch_without_a_step_moves_nothing(method):
    net = fit(method, LeavingOutByHand if "manual" in method else LeavingOut)
    assert net.moved == replicas_apart(net) == 0
    assert net.trainer.strategy.averager.steps == 3


class Saving(At):
    """Saves before its fourth step. What a batch holds depends on the step alone."""

    path = ""

    def training_step(self, batch, index):
        begin = 8 * (WORLD * self.global_step + RANK)
        return super().training_step([part[begin : begin + 8] for part in examples().tensors], index)

    def act(self):
        if self.path and self.global_step == 3:
            self.trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, *args):
        if self.global_step == 3:
            self.after_three = {name: local(each).clone() for name, each in self.state_dict().items()}


@cases(*BEFORE_STEP, ("dgc sgd", "on_before_backward"), ("onebit adamw", "training_step"))
@on_ranks(2)
def test_a_save_in_a_step_is_that_of_the_step_before_and_resumes(method, at, tmp_path):
    path = tmp_path / "in a step.ckpt"
    net = fit(method, Saving, at=at, path=path)
    if path.is_file():  # not sharded
        saved = torch.load(path, weights_only=True)
        assert saved["global_step"] == 3
        assert all(torch.equal(saved["state_dict"][name], each) for name, each in net.after_three.items())
    assert apart(net, fit(method, Saving, ckpt_path=path)) == 0


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


@cases(
    *[(method, at) for method in FEW for at in ("training_step", "on_before_backward", "on_after_backward")],
    ("dgc sgd", "no loss"),
)
@on_ranks(2)
def test_an_error_in_a_step_leaves_the_weights_of_the_step_before_on_all_ranks(method, at):
    nets, mixin, error = [], Raising, (ArithmeticError, "fourth")
    if at == "no loss":
        mixin, error = WithoutLoss, (RuntimeError, "None")
    with pytest.raises(error[0], match=error[1]):
        fit(method, mixin, at=at, setup=lambda self, stage: nets.append(self))
    [net] = nets
    assert torch.equal(weights(net), net.after_three) and replicas_apart(net) == 0


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


@with_methods(FEW)
@on_ranks(2)
def test_post_step_hooks_come_after_the_weights_have_moved(method):
    net = fit(method, Clamping)
    assert 0.019 < net.largest <= 0.0201 and replicas_apart(net) == 0


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


@with_methods(("dgc sgd", "hsdp adamw"))
@on_ranks(2)
def test_moments_that_are_zeroed_replaced_or_cleared_count(method):
    nets = {how: switched(method, how) for how in ("", "zero", "replace", "clear", "new")}
    assert min(apart(nets[how], nets[""]) for how in nets if how) > 1e-3
    assert apart(nets["zero"], nets["replace"]) == apart(nets["clear"], nets["new"]) == 0
    assert not any(map(replicas_apart, nets.values()))


@with_methods(AUTOMATIC)
@on_ranks(2)
def test_another_optimizer_in_mid_run(method):
    """With one of the same class, whose learning rate is 0, nothing moves; another class is an error."""
    same, other = torch.optim.SGD, torch.optim.AdamW
    if method.endswith("adamw"):
        same, other = other, same
    still = switched(method, "new", lambda parameters: same(parameters, lr=0.0))
    assert torch.equal(weights(still), still.before)
    with pytest.raises(ValueError, match=r"another optimizer in mid-run with .*allowed: one of the same class"):
        switched(method, "new", lambda parameters: other(parameters, lr=0.01))


@on_ranks(2)
def test_another_class_of_optimizer_where_error_feedback_stays_on_gradients():
    net = switched("onebit sgd", "new", lambda parameters: torch.optim.RMSprop(parameters, lr=0.01))
    assert replicas_apart(net) == 0 < apart_of(weights(net), net.before)


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


@with_methods(FEW)
@on_ranks(2)
def test_torchs_own_optimizer_in_automatic_optimization(method):
    """With the closure given to the optimizer, and called before."""
    normal = fit(method, Nesterov)
    assert [apart(fit(method, Raw, with_closure=closure), normal) for closure in (True, False)] == [0, 0]


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


@pytest.mark.parametrize(
    ("method", "clip", "bad"), [*((method, None, torch.nan) for method in AUTOMATIC), ("dgc sgd", 0.05, 1e20)]
)
@on_ranks(2)
def test_gradients_outside_the_optimizer_have_no_part(method, clip, bad):
    trainer = {"gradient_clip_val": clip}
    frozen = fit(method, HeadOnly, frozen=True, trainer=trainer, batches=4)
    net = fit(method, HeadOnly, bad=bad, trainer=trainer, batches=4)
    assert apart(net.head, frozen.head) == 0
    assert not float(net.body.weight.grad.abs().max()) < 1e15


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


@pytest.mark.parametrize("wrap", [Lookahead, Duck])
@with_methods(("onebit sgd", "powersgd adamw"))
@on_ranks(2)
def test_wrapped_optimizers(method, wrap):
    net = fit(method, Wrapped, wrap=wrap, epochs=2)
    averager = net.trainer.strategy.averager
    assert replicas_apart(net) == 0
    assert averager.steps == 12 and averager.has_unsent
    assert loss(net) < 0.9 * loss(fit("ddp sgd", batches=0))


@on_ranks(2)
def test_a_wrapper_that_adds_nothing_changes_nothing():
    assert apart(fit("onebit sgd", Wrapped, wrap=Duck), fit("onebit sgd")) == 0


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


@with_methods(AUTOMATIC)
@on_ranks(2)
def test_an_optimizer_that_is_made_beforehand_warms_up_from_the_start(method):
    net, full = fit(method, WarmUp), 0.01 if "adamw" in method else 0.05
    assert net.calls == 1
    assert net.rates == pytest.approx([full * tenths / 10 for tenths in range(1, 7)])


# Weights that the module writes, layers that are its own


class Unit(At):
    """Normalises the rows of the head, by `.data` as WGANs clamp."""

    def act(self):
        rows = local(self.head.weight.data)
        rows.copy_(nn.functional.normalize(rows, dim=1))


DURING = ("training_step", "on_before_zero_grad")
AROUND = ("on_train_batch_start", "optimizer_step", "on_train_batch_end")
NOT_LOCAL = {"local_weights": False}


@pytest.mark.parametrize(
    ("method", "at", "options"),
    [
        *(("dgc sgd", at, {}) for at in AROUND),
        *((method, "on_train_batch_end", {}) for method in ("onebit adamw", "hsdp adamw")),
        *(("dgc sgd", at, NOT_LOCAL) for at in DURING),
        ("onebit adamw", "training_step", NOT_LOCAL),
        ("hsdp adamw", "training_step", NOT_LOCAL),
        *(("onebit sgd", at, {}) for at in DURING),
        ("manual dgc", "training_step", {}),
    ],
)
@on_ranks(2)
def test_weights_that_the_module_writes_stay_written(method, at, options):
    """Outside of local weights, and where there are none."""
    net = fit(method, Unit, at=at, strategy=options)
    norms = local(net.head.weight).detach().norm(dim=1)
    written_last = at in ("optimizer_step", "on_train_batch_end")  # else a step follows
    assert float((norms - 1).abs().max()) < (1e-6 if written_last else 0.05)
    assert replicas_apart(net) == 0


INSIDE = list(zip(("dgc sgd", "onebit adamw"), DURING, strict=True))


@cases(*INSIDE, ("hsdp adamw", "training_step"))
@on_ranks(2)
def test_writes_into_local_weights_are_errors(method, at):
    """FSDP2 gives the module weights of its own between forward and backward, whose changes it forgets."""
    with pytest.raises(
        ValueError, match=r"local weights .*'head.weight'.*allowed: local_weights=False.*on_train_batch"
    ):
        fit(method, Unit, at=at)


class Expert(At):
    """A layer and a sparse buffer that DDP is told to leave alone: each rank has its own layer."""

    def __init__(self):
        super().__init__()
        self.expert = nn.Linear(32, 32, bias=False)
        nn.init.constant_(self.expert.weight, 0.01 * (RANK + 1))
        self.begin = weights(self.expert)
        self.register_buffer("graph", torch.eye(32).to_sparse(), persistent=False)
        self._ddp_params_and_buffers_to_ignore = ["expert.weight", "graph"]

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return self.head(hidden + self.expert(hidden))


@with_methods(AUTOMATIC)
@on_ranks(2)
def test_parameters_that_ddp_is_told_to_ignore_are_each_ranks_own(method):
    net = fit(method, Expert)
    moved = weights(net.expert) - net.begin
    assert replicas_apart(net.body) == replicas_apart(net.head) == 0
    assert float(moved.abs().max()) > 1e-3 and float(moved.mean().abs()) < 2e-3  # 0.01 between two ranks


class FrozenOnOneRank(At):
    def on_train_batch_start(self, batch, index):
        self.body.requires_grad_(RANK == 0 or index < 3)


@with_methods(AUTOMATIC)
@on_ranks(2)
def test_a_layer_frozen_on_one_rank_is_named(method):
    with pytest.raises(ValueError, match=r"'body\.weight': got 'trains on rank 0, is frozen on rank 1'"):
        fit(method, FrozenOnOneRank, strategy=UNUSED)


class MadeInSetup(At):
    def __init__(self):
        super().__init__()
        self.head = None

    def setup(self, stage):
        self.head = nn.Linear(32, 4)


EXCLUDING = {"dgc": partial(lgc.DGC, sparsity=0.9, dense_epochs=0), "onebit": lgc.OneBit}


@pytest.mark.parametrize("make", EXCLUDING.values(), ids=EXCLUDING)
@on_ranks(2)
def test_layers_made_in_setup_may_be_excluded(make):
    def train(pattern):
        strategy = forced(make(min_elements=32, warmup_epochs=0, exclude=[pattern]))
        net = type("Net", (MadeInSetup, Net), {})()
        trainer_for(strategy, epochs=1).fit(net, loader(3))
        return {name for parts in strategy.averager.state_dict()["memory"].values() for name in parts}

    assert train("head.*") == {"body.weight"}
    with pytest.raises(ValueError, match=r"exclude: got 'tail.\*'"):
        train("tail.*")


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


@with_methods(AUTOMATIC)
@on_ranks(2)
def test_buffers_of_each_ranks_data_are_no_difference_of_replicas(method):
    fit(method, Observed)


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


@pytest.mark.parametrize(
    ("method", "at", "since"),
    [
        *((method, at, 0) for method, at in INSIDE),
        ("hsdp adamw", "on_before_zero_grad", 0),
        ("unverified sgd", "training_step", 5),
        ("unverified adamw", "on_before_zero_grad", 5),
    ],
)
@on_ranks(2)
def test_a_teacher_that_follows_local_weights_is_an_error(method, at, since):
    """In the first steps, or at the end of the fit if it changes only after the steps that are compared."""
    message = "'teacher.weight', which on rank 1 .*on_train_batch_end.*local_weights=False"
    with pytest.raises(ValueError, match=message):
        fit(method, Taught, at=at, since=since)


@pytest.mark.parametrize(
    ("method", "at", "options"),
    [
        *((method, at, {}) for method, at in zip(FEW, AROUND, strict=True)),
        ("manual dgc", "training_step", {}),
        *((method, "on_before_zero_grad", NOT_LOCAL) for method in ("onebit adamw", "hsdp adamw")),
    ],
)
@on_ranks(2)
def test_a_teacher_that_follows_shared_weights_is_the_same_on_all_ranks(method, at, options):
    assert replicas_apart(fit(method, Taught, at=at, strategy=options)) == 0


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


@pytest.mark.parametrize(
    ("method", "mixin"),
    [*((method, Spectral) for method in FEW), ("dgc sgd", Normed), ("onebit adamw", Normed)],
)
@on_ranks(2)
def test_buffers_and_averages_are_the_same_whenever_they_are_read(method, mixin):
    """At validations and after the fit."""
    net = fit(method, mixin, epochs=2, validate=True)
    assert net.seen == 0
    assert spread(torch.cat([each.float().reshape(-1) for each in net.buffers()])) == replicas_apart(net) == 0


# Fabric, where the loop is the user's


@with_methods(AUTOMATIC)
@on_ranks(2)
def test_fabric_leaves_out_steps_and_discards_gradients(method):
    """Of three steps one is left out, and before another the head's gradients are discarded."""
    strategy, base = METHODS[method]
    made = lgc.CompressedFabricStrategy(strategy().compressor, topology="all_gather")
    own = L.Fabric(strategy=made, accelerator="cpu", devices=WORLD)
    own.launch()
    own.seed_everything(0, verbose=False)
    bare, (x, y) = base(), examples().tensors
    model, optimizer = own.setup(bare, bare.configure_optimizers())
    for step in range(12):
        begin = 8 * (WORLD * (step % 10) + RANK)
        optimizer.zero_grad()
        own.backward(nn.functional.mse_loss(model(x[begin : begin + 8]), y[begin : begin + 8]))
        before, head = weights(bare), weights(bare.head)
        if step % 3 == 2:
            bare.head.zero_grad()
        if step % 3 != 1:
            optimizer.step()
        assert torch.equal(weights(bare), before) == (step % 3 == 1)
        assert torch.equal(weights(bare.head), head) == (step % 3 > 0)
    assert replicas_apart(bare) == 0
    assert made.averager.steps == 8
