"""Overflows, replicas that differ, hooks that find update directions in `p.grad`, and clipping by the Trainer."""

import re
import warnings

import pytest
import torch
from features_kit import (
    RANK,
    Adam,
    Manual,
    Net,
    apart,
    dense,
    dgc,
    examples,
    fit,
    forced,
    loader,
    nothing_dropped,
    on_every_rank,
    onebit,
    trainer_for,
)
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

import lightning_gradcomp as lgc
from lightning_gradcomp.averaging.replicas import ReplicasDiffer
from tests.processes import on_ranks


class Overflow(Net):
    """The gradient of one weight is infinite on rank 1, at step 5."""

    def on_train_start(self):
        self.body.weight.register_hook(
            lambda gradient: gradient * torch.inf if RANK == 1 and self.trainer.global_step == 5 else gradient
        )


def scaled():
    """Options of a Trainer that scales the loss."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


@on_ranks(2)
def test_a_loss_scale_is_as_under_ddp():
    """With clipping the norm is taken of scaled gradients; a last bit can be more of one in fp16."""
    assert apart(fit("ddp", **scaled())[1], fit(dense(), **scaled())[1]) == 0
    clip = {"gradient_clip_val": 0.1}
    assert apart(fit("ddp", **clip, **scaled())[1], fit(nothing_dropped(), **clip, **scaled())[1]) <= 1e-5


def eden():
    return forced(lgc.EDEN(min_elements=32))


@pytest.mark.parametrize("make", [dense, eden, dgc])
@on_ranks(2)
def test_training_recovers_from_an_overflow_on_one_rank(make):
    (x, y), losses = examples(20).tensors, []
    for net in (Net, Overflow):
        trainer, _ = fit(make(), net, batches=20, epochs=1, **scaled())
        losses.append(nn.functional.mse_loss(trainer.lightning_module(x), y).item())
    without, overflown = losses
    assert trainer.precision_plugin.scaler.get_scale() == 2**9  # half of what it was: one step was given up
    assert overflown == pytest.approx(without, rel=0.15) and overflown != without  # of 20 steps it had one less
    kinds = trainer.strategy.averager.state_dict()["memory"]
    assert all(bool(part.isfinite().all()) for parts in kinds.values() for part in parts.values())


class Disturb(Callback):
    """Changes a weight on rank 1 by its last bit."""

    def on_train_batch_start(self, trainer, pl_module, batch, index):
        if RANK == 1 and trainer.global_step == 4:
            weight = pl_module.head.weight.detach()
            weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))


@pytest.mark.parametrize("make", [Net, Manual])
@on_ranks(2)
def test_a_disturbed_replica_is_named(make):
    with pytest.raises(ReplicasDiffer, match=r"step 5: parameter 'head.weight' on rank 1 .*1 of 4 parameters"):
        fit(onebit(), make, callbacks=[Disturb()])


@on_ranks(2)
def test_ranks_with_unequal_numbers_of_batches_are_refused():
    trainer = trainer_for(onebit(), use_distributed_sampler=False)
    with pytest.raises(ValueError, match="training batches an epoch: got 'rank 0: 4, rank 1: 6'"):
        trainer.fit(Net(), loader(2 + RANK))


# Hooks that find update directions


class Logging(Adam):
    def on_before_optimizer_step(self, optimizer):
        self.norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])


class Clipping(Adam):
    def on_after_backward(self):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Guarding(Logging):
    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        if self.norm > 1e-3:
            optimizer.zero_grad()


class ClippingInStep(Adam):
    def optimizer_step(self, epoch, index, optimizer, closure):
        closure()
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        optimizer.step()


class TorchsOptimizer(Adam):
    """Steps torch's own optimizer, as Lightning's documentation shows."""

    def optimizer_step(self, epoch, index, optimizer, closure):
        closure()
        optimizer.optimizer.step()


class Skipping(Adam):
    def optimizer_step(self, epoch, index, optimizer, closure):
        closure()


class ClippingByHand(Adam, Manual):
    def training_step(self, batch, index):
        loss = Net.training_step(self, batch, index)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        optimizer.step()


class ByHand(Adam, Manual):
    pass


class WarmingUp(Adam):
    def optimizer_step(self, epoch, index, optimizer, closure):
        optimizer.param_groups[0]["lr"] = 0.01 * min(1, index / 5)
        optimizer.step(closure)


def told(strategy, make, **options):
    """What rank 0 says about update directions."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(strategy, make, **options)
    said = [str(each.message) for each in caught if "update direction" in str(each.message)]
    return on_every_rank(said)[0]


FOUND = "p.grad holds update directions .* about ([\\d.]+) times .*gradient_clip_val"
NORM = r"norm of \S+ in p.grad, and of 0.1 when"
TOLD = {
    "Logging": (onebit, Logging, "Logging.on_before_optimizer_step", None),
    "loss scale": (onebit, Logging, "Logging.on_before_optimizer_step", None),
    "Clipping": (onebit, Clipping, "Clipping.on_after_backward", NORM),
    "Guarding": (onebit, Guarding, "Guarding.on_before_optimizer_step", "were discarded"),
    "ClippingInStep": (onebit, ClippingInStep, "ClippingInStep.optimizer_step", NORM),
    "TorchsOptimizer": (onebit, TorchsOptimizer, "TorchsOptimizer.optimizer_step", None),
    "Skipping": (onebit, Skipping, "Skipping.optimizer_step", "were discarded"),
    "callback": (dgc, Net, "LambdaCallback.on_before_optimizer_step", None),
}
"""What trains, the hook that is named, and what else is said."""


@pytest.mark.parametrize("case", TOLD)
@on_ranks(2)
def test_hooks_that_find_update_directions_are_told(case):
    make_strategy, make, hook, more = TOLD[case]
    options = scaled() if case == "loss scale" else {}
    if case == "callback":
        options = {"callbacks": [LambdaCallback(on_before_optimizer_step=lambda *args: None)]}
    first, *rest = told(make_strategy(), make, **options)
    times = re.match(rf"{hook}: .* {FOUND}", first)
    assert times and float(times[1]) > 0, first
    assert len(rest) == bool(more) and all(re.match(rf"{hook}: .*{more}", said) for said in rest), rest


@on_ranks(2)
def test_manual_clipping_of_update_directions_is_told():
    [said] = told(dgc(), ClippingByHand)
    assert re.match(rf"ClippingByHand.training_step: .* {NORM} .*gradient_clip_val", said), said


@on_ranks(2)
def test_other_modules_are_told_nothing():
    assert not told(onebit(), WarmingUp)
    assert not told(onebit(), Adam, callbacks=[GradientAccumulationScheduler({1: 2})])
    assert not told(dgc(), ByHand)
    assert not told("ddp_int8", Clipping)  # `p.grad` holds gradients


# Clipping that a callback changes


class ClipWarmUp(Callback):
    """Sets the Trainer's threshold, and another option, as a fit starts. Remembers the thresholds that it reads."""

    def __init__(self, threshold, algorithm=None):
        self.threshold, self.algorithm, self.read = threshold, algorithm, []

    def on_train_start(self, trainer, module):
        self.read.append(trainer.gradient_clip_val)
        trainer.gradient_clip_val = self.threshold
        trainer.gradient_clip_algorithm = self.algorithm or trainer.gradient_clip_algorithm

    def on_train_epoch_end(self, trainer, module):
        self.read.append(trainer.gradient_clip_val)


class ClippingItself(Net):
    def on_before_optimizer_step(self, optimizer):
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


LOOSE = {"gradient_clip_val": 10.0}


@on_ranks(2)
def test_a_callback_may_change_the_clipping_in_training():
    callback = ClipWarmUp(0.1)
    trainer, local = fit(dgc(), **LOOSE, callbacks=[callback])
    assert [*callback.read, trainer.gradient_clip_val] == [10.0, 0.1, 0.1, 0.1]
    assert apart(local, fit(dgc(), gradient_clip_val=0.1)[1]) == 0
    assert apart(fit(dgc(), **LOOSE, callbacks=[ClipWarmUp(None)])[1], fit(dgc())[1]) == 0
    stock, dense_phase = (
        fit(strategy, **LOOSE, callbacks=[ClipWarmUp(0.1)])[1] for strategy in ("ddp", nothing_dropped())
    )
    assert apart(stock, dense_phase) <= 1e-6


@on_ranks(2)
def test_clipping_that_cannot_be_applied_locally_is_refused_in_training():
    with pytest.raises(ValueError, match=r"Trainer\(gradient_clip_algorithm\) with DGC: got 'value', allowed: norm"):
        fit(dgc(), **LOOSE, callbacks=[ClipWarmUp(0.1, "value")])
    with pytest.raises(ValueError, match=r"DGC.clip_norm and Trainer\(gradient_clip_val\): got 'both', allowed: one"):
        fit(dgc(clip_norm=1.0), callbacks=[ClipWarmUp(0.1)])
    allowed = r"clipping with DGC by another threshold .*: got 'self.clip_gradients', allowed: DGC\(clip_norm"
    with pytest.raises(ValueError, match=allowed):
        fit(dgc(), ClippingItself)
