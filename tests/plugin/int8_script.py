"""Averages in 8 bits inside DDP, with what DDP's own hooks work with. Runs on both ranks; prints one JSON line.

usage: int8_script.py FOLDER
"""

import threading
from unittest import mock

import lightning as L
import torch
from features import Adversaries, Freezing, PartlyUsed
from features_errors import BlockSync
from features_kit import (
    RANK,
    WORLD,
    Manual,
    Net,
    apart,
    dense,
    examples,
    fit,
    forced,
    loader,
    on_every_rank,
    run,
    spread,
    trainer_for,
    weights,
)

import lightning_gradcomp as lgc
from lightning_gradcomp.plugin import int8_buckets

SMALL = 0.0004
"""MB of a bucket that the head's weights fill."""


def int8(**ddp):
    """Of a `Net`, both weights travel in 8 bits."""
    return forced(lgc.Int8(min_elements=32), verify_replicas_every_n_steps=1, **ddp)


def compared(make=Net, *, ddp=None, **options):
    """How far the weights are from those of dense averages and between the ranks, and what the exchange came to."""
    options, ddp = {"batches": 7, "epochs": 1, **options}, ddp or {}
    exact = fit(dense(**ddp), make, **options)[1]
    trainer, after = fit(int8(**ddp), make, **options)
    threads = [thread.name for thread in threading.enumerate() if thread.name == "int8 buckets"]
    return {
        "apart": apart(exact.float(), after.float()),
        "replicas_apart": spread(after.float()),
        "ratio": trainer.strategy.averager.stats.ratio,
        "threads_left": len(threads),
    }


def accumulation():
    return compared(accumulate_grad_batches=3, batches=10)


def unused_parameters():
    return compared(PartlyUsed, ddp={"find_unused_parameters": True})


def static_graph():
    return compared(ddp={"static_graph": True})


def gradient_as_bucket_view():
    """True, the strategy's default, is in all the others."""
    return compared(ddp={"gradient_as_bucket_view": False})


def many_buckets():
    return compared(ddp={"bucket_cap_mb": SMALL})


def manual_optimization():
    return compared(Manual)


def no_sync():
    return compared(BlockSync)


def several_optimizers():
    return compared(Adversaries, ddp={"find_unused_parameters": True})


def freezing():
    """DDP does not know the layer that is frozen at first; the averager averages while it trains."""
    return compared(Freezing, batches=14)


def low_precision():
    return compared(precision="bf16-true")


def uneven_inputs():
    """Rank 1 has one more batch, for which rank 0 contributes zeros."""

    def trained(strategy):
        fabric = L.Fabric(accelerator="cpu", devices=WORLD, strategy=strategy)
        fabric.launch()
        L.seed_everything(0, verbose=False)
        net = Net()
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
        x, y = examples(10).tensors
        with model._forward_module.join():
            for start in range(0, 8 * (3 + RANK), 8):
                rows = slice(80 * RANK + start, 80 * RANK + start + 8)
                optimizer.zero_grad()
                fabric.backward(torch.nn.functional.mse_loss(model(x[rows]), y[rows]))
                optimizer.step()
        return weights(net)

    after = trained(lgc.CompressedFabricStrategy(lgc.Int8(min_elements=32)))
    return {"apart": apart(after, trained("ddp")), "replicas_apart": spread(after)}


class Waiting(Net):
    """In the third step, when DDP has made its buckets, its first layer waits for the exchange of the last one."""

    begun: threading.Event
    seen = False

    def on_fit_start(self):
        self.body.weight.register_hook(self.wait)

    def wait(self, gradient):
        if self.trainer.global_step == 2:
            self.seen = self.begun.wait(timeout=10)


def overlap():
    """True on both ranks if buckets are exchanged while backward computes others."""
    Waiting.begun, average = threading.Event(), int8_buckets.mean_in_int8

    def recorded(*arguments):
        if trainer.global_step == 2:
            Waiting.begun.set()
        return average(*arguments)

    trainer, net = trainer_for(int8(bucket_cap_mb=SMALL), epochs=1, limit_train_batches=3), Waiting()
    with mock.patch.object(int8_buckets, "mean_in_int8", recorded):
        trainer.fit(net, loader())
    return on_every_rank(net.seen)


if __name__ == "__main__":
    run(
        (
            accumulation, unused_parameters, static_graph, gradient_as_bucket_view, many_buckets, manual_optimization,
            no_sync, several_optimizers, freezing, low_precision, uneven_inputs, overlap,
        )
    )  # fmt: skip
