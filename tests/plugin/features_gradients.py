"""Which gradients are averaged: of layers that are unfrozen, of several optimizers, of discarded backward calls.

Part of `features.py`.
"""

import torch
from features_kit import (
    Adam,
    Manual,
    Net,
    dgc,
    fit,
    forced,
    onebit,
    raised,
    spread,
    supported,
)
from torch import nn

import lightning_gradcomp as lgc


class Swapped(Net):
    """The body trains from step 4 on, and the head, which is all that DDP knows, until then."""

    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)

    def on_train_batch_start(self, *args):
        self.body.requires_grad_(self.trainer.global_step >= 4)
        self.head.requires_grad_(self.trainer.global_step < 4)


class SwappedByZeroing(Net):
    """As `Swapped`, by taking gradients away."""

    def on_after_backward(self):
        (self.head if self.trainer.global_step >= 4 else self.body).zero_grad()


def unfrozen_layers_unknown_to_ddp():
    """Also how far apart the ranks are with topology="auto"."""
    auto = [lgc.CompressedDDPStrategy(lgc.OneBit(min_elements=32, warmup_epochs=0)), lgc.CompressedDDPStrategy("none")]
    return {
        **supported(Swapped, reference=SwappedByZeroing, batches=10),
        "auto": [spread(fit(s, Swapped)[1]) for s in auto],
    }


class Growing(Net):
    """Gets a layer in its second epoch."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.more = nn.Linear(4, 4)
            self.trainer.optimizers[0].add_param_group({"params": self.more.parameters()})

    def forward(self, x):
        return self.more(super().forward(x)) if self.current_epoch else super().forward(x)


def added_layer():
    return raised(fit, onebit(), Growing)


class FrozenLate(Net):
    def on_train_batch_start(self, *args):
        self.body.requires_grad_(self.trainer.global_step < 4)


def frozen_while_training():
    return raised(fit, onebit(), FrozenLate)


class Untoggled(Net):
    """Two optimizers as in a GAN, without toggling: each loss leaves gradients on both layers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        for sign, optimizer in zip((1, -0.1), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(sign * super().training_step(batch, index))
            optimizer.step()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.head.parameters(), lr=0.01), torch.optim.SGD(self.body.parameters(), lr=0.01)


class OneBackward(Untoggled):
    """One loss for both optimizers."""

    def training_step(self, batch, index):
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(Net.training_step(self, batch, index))
        for optimizer in optimizers:
            optimizer.step()


def untoggled_optimizers():
    return supported(Untoggled)


def one_backward_for_two_optimizers():
    return supported(OneBackward)


class Discarding(Untoggled):
    """The head's own loss is 0; the gradients that the body's leaves on it are discarded."""

    def training_step(self, batch, index):
        head, body = self.optimizers()
        body.zero_grad()
        self.manual_backward(Net.training_step(self, batch, index))
        body.step()
        head.zero_grad()
        self.manual_backward(0 * Net.training_step(self, batch, index))
        head.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1), torch.optim.SGD(self.body.parameters(), lr=0.1)

    def on_fit_start(self):
        self.before = [self.head.weight.clone(), self.body.weight.clone()]


def discarded_gradients():
    """How far head and body have moved, by compressor."""
    moved = {}
    for compressor in (
        lgc.OneBit(min_elements=32, warmup_epochs=0),
        lgc.PowerSGD(min_elements=32, warmup_epochs=0, rank=1),
    ):
        net = fit(forced(compressor), Discarding)[0].lightning_module
        now = net.head.weight, net.body.weight
        moved[type(compressor).__name__] = [(a - b).abs().max().item() for a, b in zip(now, net.before, strict=True)]
    return moved


class Skipping(Net):
    """Skips every other step of its optimizer, in automatic optimization."""

    def optimizer_step(self, epoch, index, optimizer, closure):
        closure() if index % 2 else optimizer.step(closure=closure)


class NotZeroing(Skipping):
    def optimizer_zero_grad(self, *args):
        pass


def skipped_steps():
    return {"replicas_apart": spread(fit(onebit(), Skipping)[1]), "not_zeroing": raised(fit, onebit(), NotZeroing)}


class TorchsOptimizer(Manual):
    def optimizers(self):
        return super().optimizers(use_pl_optimizer=False)


def torchs_own_optimizer():
    return raised(fit, onebit(), TorchsOptimizer)


class ClippedManual(Manual):
    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(Net.training_step(self, batch, index))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()


class ClippedManualAdam(ClippedManual):
    configure_optimizers = Adam.configure_optimizers


def manual_clipping():
    return {**supported(ClippedManualAdam, without=Adam), "dgc": raised(fit, dgc(), ClippedManual)}


FEATURES = (
    unfrozen_layers_unknown_to_ddp, added_layer, frozen_while_training, untoggled_optimizers,
    one_backward_for_two_optimizers, discarded_gradients, skipped_steps, torchs_own_optimizer, manual_clipping,
)  # fmt: skip
