"""Which gradients are averaged: of layers that are unfrozen, of several optimizers, of discarded backward calls.

Part of `features.py`.
"""

import warnings
from contextlib import nullcontext

import torch
from features_kit import (
    Adam,
    Manual,
    Net,
    apart,
    dgc,
    fit,
    forced,
    on_every_rank,
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


class TorchsOptimizers(OneBackward):
    def optimizers(self):
        return super().optimizers(use_pl_optimizer=False)


def torchs_own_optimizer():
    """How far from Lightning's, where there is one; and what is raised where there are several."""
    moved = [fit(onebit(), make)[1] for make in (TorchsOptimizer, Manual)]
    return {"apart": apart(*moved), "several": raised(fit, onebit(), TorchsOptimizers)}


class Guarded(Manual):
    """Clips, and skips steps whose norm is not finite. Rank 1 has a bad example."""

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = Net.training_step(self, batch, index)
        self.manual_backward(loss * float("nan") if index == 5 and self.global_rank == 1 else loss)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        self.norms = [*getattr(self, "norms", ()), norm.item()]
        if norm.isfinite():
            optimizer.step()


def guarded():
    """On every rank: norms and steps. And replicas apart."""
    found = {}
    for name, strategy in (("dgc", dgc()), ("onebit", onebit())):
        trainer, moved = fit(strategy, Guarded, epochs=1)
        seen = [str(trainer.lightning_module.norms), trainer.global_step]
        found[name] = {"ranks": on_every_rank(seen), "replicas_apart": spread(moved)}
    return found


class Accumulating(Manual):
    """Steps after every second batch; the first one's gradients stay local if `no_sync`."""

    no_sync = False

    def training_step(self, batch, index):
        optimizer, first = self.optimizers(), index % 2 == 0
        with self.trainer.strategy.block_backward_sync() if self.no_sync and first else nullcontext():
            self.manual_backward(Net.training_step(self, batch, index))
        if not first:
            optimizer.step()
            optimizer.zero_grad()

    def on_before_optimizer_step(self, optimizer):
        pass  # may find update directions


class NotSynced(Accumulating):
    no_sync = True


def manual_accumulation():
    found = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for make_strategy in (dgc, onebit):
            (_, moved), (_, expected) = (fit(make_strategy(), make) for make in (Accumulating, NotSynced))
            found[make_strategy.__name__] = apart(moved, expected)
    return {**found, "discards": [str(each.message) for each in caught if "discarded" in str(each.message)]}


class Toggled(Untoggled):
    """Both losses before both steps, each with the other optimizer's parameters frozen; averages what it leaves."""

    def training_step(self, batch, index):
        optimizers = self.optimizers()
        for sign, optimizer in zip((1, -0.1), optimizers, strict=True):
            optimizer.zero_grad()
            self.toggle_optimizer(optimizer)
            self.manual_backward(sign * Net.training_step(self, batch, index))
            self.untoggle_optimizer(optimizer)
        for optimizer in optimizers:
            optimizer.step()


def toggled_optimizers():
    return supported(Toggled, ddp={"find_unused_parameters": True})


class SkipsOnOneRank(Manual):
    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(Net.training_step(self, batch, index))
        if self.global_rank == 0 or index != 5:
            optimizer.step()


class SkipsOneOfSeveral(OneBackward):
    def training_step(self, batch, index):
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(Net.training_step(self, batch, index))
        for place, optimizer in enumerate(optimizers):
            if self.global_rank == 0 or (index, place) != (5, 0):
                optimizer.step()


def skipped_on_one_rank():
    unverified = {"verify_replicas_every_n_steps": None}
    return {make.__name__: raised(fit, onebit(**unverified), make) for make in (SkipsOnOneRank, SkipsOneOfSeveral)}


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
    guarded, manual_accumulation, toggled_optimizers, skipped_on_one_rank,
)  # fmt: skip
