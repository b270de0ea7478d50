"""Features of the Trainer, concluded: precision with gradients that overflow, and what is refused while fitting.

Part of `features.py`.
"""

import warnings

import torch
from features_kit import (
    RANK,
    SGD,
    Manual,
    Net,
    apart,
    compressed,
    dense,
    dgc,
    examples,
    fit,
    loader,
    nothing_dropped,
    on_every_rank,
    onebit,
    raised,
    supported,
    trainer_for,
)
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from strategies import forced
from torch import nn

import lightning_gradcomp as lgc


def low_precision():
    strategies = {"bf16-mixed": dgc, "bf16-true": onebit, "16-true": dgc}
    return {precision: compressed(strategy(), precision=precision) for precision, strategy in strategies.items()}


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


def loss_scale():
    """How far from DDP, without clipping and with."""
    clip = {"gradient_clip_val": 0.1}
    return [
        apart(fit("ddp", **scaled())[1], fit(dense(), **scaled())[1]),
        apart(fit("ddp", **clip, **scaled())[1], fit(nothing_dropped(), **clip, **scaled())[1]),
    ]


def overflow():
    """Final losses without and with it, scale and finiteness of what is remembered after it."""
    result, (x, y) = {}, examples(20).tensors
    for make_strategy in (dense, dgc):
        losses = []
        for make in (Net, Overflow):
            strategy = make_strategy()
            trainer, _ = fit(strategy, make, batches=20, epochs=1, **scaled())
            losses.append(nn.functional.mse_loss(trainer.lightning_module(x), y).item())
        kinds = strategy.averager.state_dict()["memory"]
        finite = all(bool(part.isfinite().all()) for parts in kinds.values() for part in parts.values())
        result[make_strategy.__name__] = {
            "losses": losses,
            "scale": trainer.precision_plugin.scaler.get_scale(),
            "finite": on_every_rank(finite),
        }
    return result


class SparseEmbedding(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4, sparse=True)


def sparse_gradients():
    return raised(fit, onebit(), SparseEmbedding)


class Unused(Net):
    """A layer that nothing runs through."""

    def __init__(self) -> None:
        super().__init__()
        self.nowhere = nn.Linear(16, 4)


def unused_parameter():
    """DDP's own words, where DDP averages."""
    return raised(fit, dense(), Unused)


class TwoGradients(torch.optim.SGD):
    """Takes a second gradient in each step, where the first has led, as SAM does."""

    def step(self, closure):
        closure()
        super().step()
        loss = closure()
        super().step()
        return loss


class SharpnessAware(Net):
    def configure_optimizers(self):
        return TwoGradients(self.parameters(), lr=0.02)


def two_gradients_a_step():
    return {
        "onebit": raised(fit, onebit(), SharpnessAware),
        "apart": apart(fit("ddp", SharpnessAware)[1], fit(dense(), SharpnessAware)[1]),
    }


class TwoLosses(Manual):
    """Calls backward twice between two steps of the optimizer."""

    def first(self, loss):
        self.manual_backward(loss)

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.first(Net.training_step(self, batch, index))
        self.manual_backward(Net.training_step(self, batch, index))
        optimizer.step()


class BlockSync(TwoLosses):
    def first(self, loss):
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(loss)


def two_backward_calls():
    return supported(TwoLosses)


def block_backward_sync():
    return supported(BlockSync)


class Disturb(Callback):
    """Changes a weight on rank 1 by its last bit."""

    def on_train_batch_start(self, trainer, pl_module, batch, index):
        if RANK == 1 and trainer.global_step == 4:
            weight = pl_module.head.weight.detach()
            weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))


def disturbed_replica():
    return {
        "automatic": raised(fit, onebit(), callbacks=[Disturb()]),
        "manual": raised(fit, onebit(), Manual, callbacks=[Disturb()]),
    }


class UnknownOptimizer(Manual):
    """Steps an optimizer that Lightning does not know."""

    def configure_optimizers(self):
        return None

    def training_step(self, batch, index):
        if index == 0 and self.current_epoch == 0:
            self.__dict__["own"] = torch.optim.SGD(self.parameters(), **SGD)
        self.own.zero_grad()
        self.manual_backward(Net.training_step(self, batch, index))
        self.own.step()


def unknown_optimizer():
    """How far from DDP, and what the averager counted and said."""
    _, stock = fit("ddp", UnknownOptimizer)
    outcome = {}
    for name, strategy in (("onebit", onebit()), ("int8", forced(lgc.Int8(min_elements=32)))):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            trainer, after = fit(strategy, UnknownOptimizer)
        averager, said = trainer.strategy.averager, " ".join(str(each.message) for each in warned)
        told = "configure_optimizers must return the optimizer" in said
        outcome[name] = [apart(stock, after), averager.steps, averager.spent.ratio, told]
    return outcome


def uneven_batches():
    trainer = trainer_for(onebit(), use_distributed_sampler=False)
    return raised(trainer.fit, Net(), loader(2 + RANK))


FEATURES = (
    low_precision, loss_scale, overflow, sparse_gradients, unused_parameter, two_gradients_a_step,
    two_backward_calls, block_backward_sync, disturbed_replica, unknown_optimizer, uneven_batches,
)  # fmt: skip
