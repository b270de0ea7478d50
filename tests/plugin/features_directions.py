"""Hooks that find update directions in `p.grad`, and clipping where the compressor owns the momentum.

Part of `features.py`.
"""

import warnings

import torch
from features_errors import scaled
from features_kit import Adam, Manual, Net, apart, dgc, fit, nothing_dropped, onebit, raised
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback


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
    """What is said about update directions."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(strategy, make, **options)
    return [str(each.message) for each in caught if "update direction" in str(each.message)]


def hooks_on_directions():
    """What is said of each module; of a user's callback; of Lightning's own; and where `p.grad` holds gradients."""
    modules = Logging, Clipping, Guarding, ClippingInStep, TorchsOptimizer, Skipping, WarmingUp, Adam
    callback = LambdaCallback(on_before_optimizer_step=lambda *args: None)
    return {
        **{make.__name__: told(onebit(), make) for make in modules},
        "loss scale": told(onebit(), Logging, **scaled()),
        "ByHand": told(dgc(), ByHand),
        "ClippingByHand": told(dgc(), ClippingByHand),
        "callback": told(dgc(), Net, callbacks=[callback]),
        "lightning's": told(onebit(), Adam, callbacks=[GradientAccumulationScheduler({1: 2})]),
        "gradients": told("ddp_int8", Clipping),
    }


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


def changed_clipping():
    """How far a threshold set in training is from one set before; thresholds that are read; what can't be applied."""
    callback = ClipWarmUp(0.1)
    loose = {"gradient_clip_val": 10.0}
    trainer, local = fit(dgc(), **loose, callbacks=[callback])
    return {
        "compressed": apart(local, fit(dgc(), gradient_clip_val=0.1)[1]),
        "dense": apart(
            fit("ddp", **loose, callbacks=[ClipWarmUp(0.1)])[1],
            fit(nothing_dropped(), **loose, callbacks=[ClipWarmUp(0.1)])[1],
        ),
        "off": apart(
            fit(dgc(), **loose, callbacks=[ClipWarmUp(None)])[1],
            fit(dgc())[1],
        ),
        "read": [*callback.read, trainer.gradient_clip_val],
        "by value": raised(fit, dgc(), **loose, callbacks=[ClipWarmUp(0.1, "value")]),
        "both": raised(fit, dgc(clip_norm=1.0), callbacks=[ClipWarmUp(0.1)]),
        "by itself": raised(fit, dgc(), ClippingItself),
    }


FEATURES = hooks_on_directions, changed_clipping
