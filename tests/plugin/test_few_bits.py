"""Averages in few bits inside DDP, with what DDP's own hooks work with, on two ranks."""

import os
import threading
import warnings
from unittest import mock

import lightning as L
import pytest
import torch
from features_kit import (
    RANK,
    SGD,
    UNUSED,
    WORLD,
    Manual,
    Net,
    apart,
    dense,
    examples,
    fit,
    forced,
    loader,
    spread,
    trainer_for,
    weights,
)
from test_features import Adversaries, Freezing, PartlyUsed
from test_features_gradients import BlockSync

import lightning_gradcomp as lgc
from lightning_gradcomp.plugin import few_bit_buckets
from tests.processes import on_ranks

SMALL = 0.0004
"""MB of a bucket that the head's weights fill."""
METHODS = {"int8": lgc.Int8(min_elements=32), "eden": lgc.EDEN(bits=4, min_elements=32)}
"""Of a `Net`, both weights travel in few bits."""
methods = pytest.mark.parametrize("method", METHODS)


def few_bits(method, **ddp):
    return forced(METHODS[method], verify_replicas_every_n_steps=1, **ddp)


FEATURES = {
    "accumulation": (Net, {}, {"accumulate_grad_batches": 3, "batches": 10}),
    "unused parameters": (PartlyUsed, UNUSED, {}),
    "static graph": (Net, {"static_graph": True}, {}),
    "gradient as bucket view": (Net, {"gradient_as_bucket_view": False}, {}),  # all the others have True
    "many buckets": (Net, {"bucket_cap_mb": SMALL}, {}),
    "manual optimization": (Manual, {}, {}),
    "no_sync": (BlockSync, {}, {}),
    "several optimizers": (Adversaries, UNUSED, {}),
    "freezing": (Freezing, {}, {"batches": 14}),  # DDP does not know the layer: the averager averages while it trains
    "low precision": (Net, {}, {"precision": "bf16-true"}),
}
"""What trains, options of DDP, and of the Trainer."""


@pytest.mark.parametrize("feature", FEATURES)
@on_ranks(2)
def test_it_trains_nearly_as_dense_averages_do(feature):
    make, ddp, options = FEATURES[feature]
    options = {"batches": 7, "epochs": 1, **options}
    exact = fit(dense(**ddp), make, **options)[1]
    for method in METHODS:
        trainer, after = fit(few_bits(method, **ddp), make, **options)
        assert spread(after.float()) == 0
        # AdamW, of several optimizers, makes more of a small gradient's rounding.
        assert 0 < apart(exact.float(), after.float()) < {"int8": 0.02, "eden": 0.2}[method]
        # Of a model of which a third is biases and padding, or of which 4 bits leave out the narrow rows.
        assert trainer.strategy.averager.stats.ratio > {"int8": 1.8, "eden": 1}[method]
        assert "few-bit buckets" not in [thread.name for thread in threading.enumerate()]


def trained_on_uneven_inputs(strategy):
    """Rank 1 has one more batch, for which rank 0 contributes zeros."""
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


@methods
@on_ranks(2)
def test_a_rank_without_data_contributes_zeros(method):
    after = trained_on_uneven_inputs(lgc.CompressedFabricStrategy(METHODS[method]))
    assert spread(after) == 0 < apart(after, trained_on_uneven_inputs("ddp")) < 0.1


@methods
@on_ranks(2)
def test_gradients_with_a_graph_are_averaged(method):
    """As those of a backward without `create_graph`."""
    fabric = L.Fabric(accelerator="cpu", devices=WORLD, strategy=lgc.CompressedFabricStrategy(METHODS[method]))
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
    assert apart(*gradients) == 0


class Recorded(Net):
    """Keeps its batches."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def training_step(self, batch, index):
        self.batches.append(batch)
        return super().training_step(batch, index)


def averaged(method, trainer, inside=None):
    """Weights after the batches of a `Recorded` module by an averager without DDP, and the bytes of its last step."""
    L.seed_everything(0, verbose=False)
    net = Net()
    optimizer = net.configure_optimizers()
    options = {"optimizer": optimizer, "inside": inside, "ranks_per_node": trainer.num_devices}
    averager = lgc.GradientAverager(net, METHODS[method], **options)
    for batch in trainer.lightning_module.batches:
        optimizer.zero_grad()
        net.training_step(batch, 0).backward()
        averager.step()
    return weights(net), averager.stats.bytes_sent


@methods
@on_ranks(2)
def test_a_mean_does_not_depend_on_the_buckets(method, tmp_path):
    """An uninterrupted run, a resumed one, one with smaller buckets, and an averager without DDP."""
    trainer, whole = fit(few_bits(method), Recorded)
    path = tmp_path / "half.ckpt"
    fit(few_bits(method), epochs=1)[0].save_checkpoint(path)
    assert apart(whole, fit(few_bits(method), ckpt_path=path)[1]) == 0
    assert apart(whole, fit(few_bits(method, bucket_cap_mb=SMALL))[1]) == 0

    assert apart(whole, averaged(method, trainer)[0]) == 0


@methods
@on_ranks(4)
@mock.patch.dict(os.environ, LOCAL_RANK=str(RANK % 2))
def test_the_ranks_of_a_node_average_first(method):
    """In small buckets by the thread, as in an averager without DDP; without it, a node sends three times as much."""
    trainer, whole = fit(lgc.CompressedDDPStrategy(METHODS[method], bucket_cap_mb=SMALL), Recorded, epochs=1, nodes=2)
    after, sent = zip(*(averaged(method, trainer, inside) for inside in ("dense", "compressed")), strict=True)
    assert apart(whole, after[0]) == 0 < apart(whole, after[1])
    assert trainer.strategy.averager.stats.bytes_sent == sent[0] < sent[1] / 2


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


@on_ranks(2)
def test_the_closures_of_a_step_see_one_function():
    """The line search of LBFGS compares their values and gradients."""
    trainer, _ = fit(few_bits("int8"), LineSearch, epochs=1, limit_train_batches=3)
    assert trainer.optimizers[0].apart == [0, 0, 0]
    assert spread(fit(few_bits("int8"), SecondOrder, epochs=1, limit_train_batches=3)[1]) == 0


class Waiting(Net):
    """In the third step, when DDP has made its buckets, its first layer waits for the exchange of the last one."""

    begun: threading.Event
    seen = False

    def on_fit_start(self):
        self.body.weight.register_hook(self.wait)

    def wait(self, gradient):
        if self.trainer.global_step == 2:
            self.seen = self.begun.wait(timeout=10)


@on_ranks(2)
def test_a_bucket_is_exchanged_while_backward_computes_the_next_one():
    Waiting.begun, average = threading.Event(), few_bit_buckets.mean_in_few_bits

    def recorded(*arguments):
        if trainer.global_step == 2:
            Waiting.begun.set()
        return average(*arguments)

    trainer, net = trainer_for(few_bits("eden", bucket_cap_mb=SMALL), epochs=1, limit_train_batches=3), Waiting()
    with mock.patch.object(few_bit_buckets, "mean_in_few_bits", recorded):
        trainer.fit(net, loader())
    assert net.seen
