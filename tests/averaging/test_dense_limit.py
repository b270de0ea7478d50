"""With nothing dropped, the averager is DDP with the user's own SGD."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from lightning_gradcomp.averaging import GradientAverager
from tests.averaging.workers import (
    SGD,
    Table,
    all_equal,
    averaged,
    backward,
    conv_net,
    dgc,
    image_loss,
    prescribed_loss,
    train,
    train_ddp,
    weights,
)
from tests.threads import run_ranks

STEPS = 50
OPTIONS = {
    "nesterov": {"nesterov": True},
    "dampening": {"dampening": 0.2},
    "no momentum": {"momentum": 0.0},
}


def two_groups(model):
    """Two parameter groups that differ in everything."""
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    return torch.optim.SGD(
        [
            {"params": first, "lr": 0.03, "momentum": 0.5, "weight_decay": 0.1},
            {"params": second, "lr": 0.01, "momentum": 0.9, "nesterov": True},
        ]
    )


def one_cycle(optimizer):
    """A schedule that moves learning rate and momentum."""
    cycle = {"total_steps": STEPS + 1, "max_lr": 0.05, "cycle_momentum": True}
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, **cycle)


def sgd(**options):
    return lambda model: torch.optim.SGD(model.parameters(), **{**SGD, **options})


@dataclass
class Run:
    """A training run, with DDP or with the averager: final weights of every rank."""

    world: int = 2
    model: Callable = conv_net
    loss: Callable = image_loss
    optimizer: Callable = field(default_factory=sgd)
    scheduler: Callable = lambda optimizer: None

    def ddp(self):
        def work(rank, group):
            model = self.model()
            optimizer = self.optimizer(model)
            train_ddp(model, optimizer, group, rank, STEPS, self.loss, self.scheduler(optimizer))
            return weights(model)

        return run_ranks(self.world, work)

    def averager(self, compressor, schedule=None):
        def work(rank, group):
            model = self.model()
            optimizer = self.optimizer(model)
            averager = GradientAverager(model, compressor, optimizer=optimizer, process_group=group)
            averager.schedule = schedule or averager.schedule
            train(model, optimizer, averager, rank, STEPS, self.loss, self.scheduler(optimizer))
            return weights(model)

        return run_ranks(self.world, work)

    def assert_alike(self, compressor, schedule=None, tolerance=1e-6):
        got, expected = self.averager(compressor, schedule), self.ddp()
        assert all_equal(got)
        assert all_equal(expected)
        assert float((got[0] - expected[0]).abs().max()) <= tolerance


@pytest.mark.parametrize(("world", "options"), [(3, OPTIONS["dampening"]), (2, OPTIONS["no momentum"])], ids=str)
def test_at_sparsity_0_the_weights_are_ddps(world, options):
    Run(world, optimizer=sgd(**options)).assert_alike(dgc(sparsity=0.0))


def test_also_over_parameter_groups_that_differ():
    Run(optimizer=two_groups).assert_alike(dgc(sparsity=0.0))


def test_also_under_a_schedule_of_learning_rate_and_momentum():
    run = Run(optimizer=sgd(nesterov=True, weight_decay=0.01), scheduler=one_cycle)
    run.assert_alike(dgc(sparsity=0.0))


def test_also_in_the_dense_phase_before_the_sparse_one():
    Run(optimizer=sgd(nesterov=True)).assert_alike(dgc(), lambda epoch, step: 0.9 if step >= STEPS else 0.0)


def test_also_where_the_average_is_clipped():
    """At √N times the threshold would be local clipping: another run."""

    def clipped(model, rank, step):
        return 10 * image_loss(model, rank, step)

    def work(rank, group):
        model = conv_net()
        optimizer, averager = averaged(model, group, "none")
        for step in range(STEPS):
            backward(model, optimizer, rank, step, clipped)
            averager.average()
            averager.commit()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return weights(model)

    got = Run(loss=clipped).averager(dgc(sparsity=0.0, clip_norm=1.0))
    assert float((got[0] - run_ranks(2, work)[0]).abs().max()) <= 1e-6
    assert float((got[0] - Run(loss=clipped).ddp()[0]).abs().max()) > 1e-2


def sparse_for_a_while(epoch, step):
    """Sparse from step 10 to 29 and for three steps at 35, dense otherwise."""
    return 0.9 if 10 <= step < 30 or 35 <= step < 38 else 0.0


@pytest.mark.parametrize(("world", "options"), [(2, o) for o in OPTIONS.values()] + [(3, {})], ids=str)
def test_once_all_is_sent_the_weights_are_sgds(world, options):
    """True where gradients do not depend on the weights and momentum is not masked: then everything is linear."""
    run = Run(world, Table, prescribed_loss, sgd(**options))
    run.assert_alike(dgc(momentum_masking=False), sparse_for_a_while, tolerance=2e-5)


def test_the_same_over_parameter_groups():
    def groups(model):
        optimizer = two_groups(model)
        optimizer.param_groups[0]["weight_decay"] = 0.0
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        return optimizer

    Run(2, Table, prescribed_loss, groups).assert_alike(dgc(momentum_masking=False), sparse_for_a_while, tolerance=2e-5)


def test_the_same_while_a_schedule_moves_the_momentum():
    def momentum_alone(optimizer):
        cycle = {"total_steps": STEPS + 1, "max_lr": 0.02, "div_factor": 1.0, "final_div_factor": 1.0}
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, **cycle)

    run = Run(2, Table, prescribed_loss, sgd(nesterov=True), momentum_alone)
    run.assert_alike(dgc(momentum_masking=False), sparse_for_a_while, tolerance=2e-5)
