"""Averages in few bits inside DDP, with what DDP's own hooks work with. Runs on both ranks; prints one JSON line.

usage: few_bits_script.py FOLDER
"""

import threading
import warnings
from unittest import mock

import lightning as L
import torch
from features import Adversaries, Freezing, PartlyUsed
from features_errors import BlockSync
from features_kit import (
    FOLDER,
    RANK,
    SGD,
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
from lightning_gradcomp.plugin import few_bit_buckets

SMALL = 0.0004
"""MB of a bucket that the head's weights fill."""


METHODS = {"int8": lgc.Int8(min_elements=32), "eden": lgc.EDEN(bits=4, min_elements=32)}
"""Of a `Net`, both weights travel in few bits."""


def few_bits(method, **ddp):
    return forced(METHODS[method], verify_replicas_every_n_steps=1, **ddp)


def compared(make=Net, *, ddp=None, **options):
    """By method, how far weights are from those of dense averages and between the ranks, and what exchanges came to."""
    options, ddp, found = {"batches": 7, "epochs": 1, **options}, ddp or {}, {}
    exact = fit(dense(**ddp), make, **options)[1]
    for method in METHODS:
        trainer, after = fit(few_bits(method, **ddp), make, **options)
        threads = [thread.name for thread in threading.enumerate() if thread.name == "few-bit buckets"]
        found[method] = {
            "apart": apart(exact.float(), after.float()),
            "replicas_apart": spread(after.float()),
            "ratio": trainer.strategy.averager.stats.ratio,
            "threads_left": len(threads),
        }
    return found


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

    exact, found = trained("ddp"), {}
    for method, compressor in METHODS.items():
        after = trained(lgc.CompressedFabricStrategy(compressor))
        found[method] = {"apart": apart(after, exact), "replicas_apart": spread(after)}
    return found


def gradients_with_a_graph():
    """How far the gradients of `backward(create_graph=True)` are from those of a backward without."""
    found = {}
    for method, compressor in METHODS.items():
        fabric = L.Fabric(accelerator="cpu", devices=WORLD, strategy=lgc.CompressedFabricStrategy(compressor))
        fabric.launch()
        gradients = []
        for create_graph in (False, True):
            L.seed_everything(0, verbose=False)
            net = torch.nn.Linear(64, 1, bias=False)
            model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
                fabric.backward(model(torch.ones(1, 64) * (RANK + 1)).square().sum(), create_graph=create_graph)
            gradients.append(net.weight.grad.detach().clone())
            net.weight.grad = None  # breaks the cycle of graph and gradient
        found[method] = apart(*gradients)
    return found


class Recorded(Net):
    """Keeps its batches."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def training_step(self, batch, index):
        self.batches.append(batch)
        return super().training_step(batch, index)


def same_whatever_the_buckets():
    """How far each run is from the uninterrupted one: resumed, in smaller buckets, and by an averager without DDP."""
    return {method: _same_whatever_the_buckets(method) for method in METHODS}


def _same_whatever_the_buckets(method):
    trainer, whole = fit(few_bits(method), Recorded)
    batches, path = trainer.lightning_module.batches, FOLDER / f"{method}.ckpt"
    fit(few_bits(method), epochs=1)[0].save_checkpoint(path)
    small = few_bits(method, bucket_cap_mb=SMALL)
    others = {"resumed": fit(few_bits(method), ckpt_path=path)[1], "small buckets": fit(small)[1]}

    L.seed_everything(0, verbose=False)
    net = Net()
    optimizer = net.configure_optimizers()
    averager = lgc.GradientAverager(net, METHODS[method], optimizer=optimizer)
    for batch in batches:
        optimizer.zero_grad()
        net.training_step(batch, 0).backward()
        averager.step()
    others["averager"] = weights(net)
    return {name: apart(whole, other) for name, other in others.items()}


class Twice(torch.optim.SGD):
    """Evaluates its closure twice before each step, and keeps how far the gradients are apart."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.apart = []

    def step(self, closure):
        seen = []
        for _ in range(2):
            loss = closure()
            seen.append(torch.cat([p.grad.reshape(-1) for group in self.param_groups for p in group["params"]]))
        self.apart.append(apart(*seen))
        super().step()
        return loss


class LineSearch(Net):
    def configure_optimizers(self):
        return Twice(self.parameters(), **SGD)


class SecondOrder(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4)


def closures():
    trainer, _ = fit(few_bits("int8"), LineSearch, epochs=1, limit_train_batches=3)
    _, after = fit(few_bits("int8"), SecondOrder, epochs=1, limit_train_batches=3)
    return {"apart": trainer.optimizers[0].apart, "replicas_apart": spread(after)}


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
    Waiting.begun, average = threading.Event(), few_bit_buckets.mean_in_few_bits

    def recorded(*arguments):
        if trainer.global_step == 2:
            Waiting.begun.set()
        return average(*arguments)

    trainer, net = trainer_for(few_bits("eden", bucket_cap_mb=SMALL), epochs=1, limit_train_batches=3), Waiting()
    with mock.patch.object(few_bit_buckets, "mean_in_few_bits", recorded):
        trainer.fit(net, loader())
    return on_every_rank(net.seen)


if __name__ == "__main__":
    run(
        (
            accumulation, unused_parameters, static_graph, gradient_as_bucket_view, many_buckets, manual_optimization,
            no_sync, several_optimizers, freezing, low_precision, uneven_inputs, gradients_with_a_graph,
            same_whatever_the_buckets, closures, overlap,
        )
    )  # fmt: skip
