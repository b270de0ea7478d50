"""Runs on every rank of a world: one small training or more for each feature of the Trainer. Prints one JSON line.

usage: features.py FOLDER
"""

import features_directions
import features_errors
import features_gradients
import features_monitor
import features_more
import torch
from features_kit import (
    RANK,
    Adam,
    Manual,
    Net,
    apart,
    dgc,
    fit,
    nothing_dropped,
    on_every_rank,
    onebit,
    run,
    spread,
    supported,
)
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

import lightning_gradcomp as lgc


def accumulation():
    """The last group of an epoch has one batch."""
    return supported(accumulate_grad_batches=3, batches=10)


def clipping_the_average():
    loose, tight = fit("ddp", Adam)[1], fit("ddp", Adam, gradient_clip_val=0.1)[1]
    return {**supported(Adam, gradient_clip_val=0.1), "clipped_from_unclipped": apart(loose, tight)}


def clipping_locally():
    unclipped = fit(dgc())[1]
    by_compressor = fit(dgc(clip_norm=0.1))[1]
    trainer, by_trainer = fit(dgc(), gradient_clip_val=0.1)
    return {
        "apart": apart(by_compressor, by_trainer),
        "clipped_from_unclipped": apart(unclipped, by_trainer),
        "gradient_clip_val_afterwards": trainer.gradient_clip_val,
    }


def clipping_dense_phases():
    return apart(fit("ddp", gradient_clip_val=0.1)[1], fit(nothing_dropped(), gradient_clip_val=0.1)[1])


def no_clipping():
    """Lightning takes 0 for no clipping."""
    return apart(fit(dgc())[1], fit(dgc(), gradient_clip_val=0)[1])


def manual_optimization():
    return supported(Manual)


def manual_static_graph():
    """None where Lightning's own DDP averages nothing here, as in 2.5."""
    ddp = {"static_graph": True}
    return None if spread(fit(DDPStrategy(**ddp), Manual)[1]) else supported(Manual, ddp=ddp)


class Adversaries(Net):
    """Two optimizers, each of one layer, that take turns within a batch, like those of a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        for sign, optimizer in zip((1, -0.1), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            loss = super().training_step(batch, index)
            self.manual_backward(sign * loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.head.parameters(), lr=0.01), torch.optim.SGD(self.body.parameters(), lr=0.01)


class Counted(Adversaries):
    """With the bytes of every step added up."""

    sent = 0

    def untoggle_optimizer(self, optimizer):
        self.sent += self.trainer.strategy.averager.stats.bytes_sent
        super().untoggle_optimizer(optimizer)


def several_optimizers():
    ddp, monitor = {"find_unused_parameters": True}, lgc.CommunicationMonitor()
    trainer, _ = fit(onebit(**ddp), Counted, callbacks=[monitor])
    summary, sent = monitor.summary(), trainer.lightning_module.sent
    counted = {"steps": summary["steps"], "unseen_bytes": sent - summary["bytes_sent"], "sent": sent}
    return {**supported(Adversaries, ddp=ddp), "counted": counted}


class PartlyUsed(Net):
    """One layer is used on rank 0 only, another nowhere. Weight decay would move what is not left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.on_rank_0, self.nowhere = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x):
        return super().forward(x) + (self.on_rank_0(x) if RANK == 0 else 0)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)

    def on_fit_start(self):
        self.before = {name: layer.weight.clone() for name, layer in self.named_children()}

    def on_fit_end(self):
        self.moved = {name: not torch.equal(layer.weight, self.before[name]) for name, layer in self.named_children()}


def unused_parameters():
    ddp = {"find_unused_parameters": True}
    moved = fit(dgc(**ddp), PartlyUsed)[0].lightning_module.moved
    return {**supported(PartlyUsed, ddp=ddp), "moved": on_every_rank(moved)}


def static_graph():
    return supported(ddp={"static_graph": True})


def gradient_as_bucket_view():
    """True, the strategy's default, is in all the others."""
    return supported(ddp={"gradient_as_bucket_view": False})


class Freezing(Net):
    """The body trains in steps 4 to 9 of 14 only."""

    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)

    def on_train_batch_start(self, *args):
        self.body.requires_grad_(4 <= self.trainer.global_step < 10)


class Ignoring(Net):
    """As `Freezing`, by taking gradients away: stock DDP never averages a layer that was frozen when it started."""

    def on_after_backward(self):
        if not 4 <= self.trainer.global_step < 10:
            self.body.zero_grad()


def freezing():
    return supported(Freezing, reference=Ignoring)


class Finetuning(BaseFinetuning):
    """Lightning's own way: the layer enters the optimizer, as a group with a learning rate, when it is unfrozen."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.body, optimizer, lr=0.02, initial_denom_lr=1)


class Head(Net):
    """The optimizer begins with the head alone."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9)

    def configure_callbacks(self):
        return [Finetuning()]


class BothFromTheStart(Net):
    """What `Finetuning` comes to, with a group that is there all along and has no gradients in the first epoch."""

    def configure_optimizers(self):
        groups = [{"params": self.head.parameters()}, {"params": self.body.parameters(), "lr": 0.02}]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    def on_after_backward(self):
        if self.current_epoch < 1:
            self.body.zero_grad()


def new_parameter_group():
    return supported(Head, reference=BothFromTheStart)


if __name__ == "__main__":
    own = (
        accumulation, clipping_the_average, clipping_locally, clipping_dense_phases, no_clipping, manual_optimization,
        manual_static_graph, several_optimizers, unused_parameters, static_graph, gradient_as_bucket_view, freezing,
        new_parameter_group,
    )  # fmt: skip
    run(
        (
            *own,
            *features_gradients.FEATURES,
            *features_more.FEATURES,
            *features_monitor.FEATURES,
            *features_errors.FEATURES,
            *features_directions.FEATURES,
        )
    )
