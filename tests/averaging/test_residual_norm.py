"""What a rank has not sent, against its gradient."""

import math

import pytest
import torch

from lightning_gradcomp.compressors import DGC, OneBit, PowerSGD, TernGrad
from tests.averaging.workers import Table, averaged, backward, dgc, prescribed_loss
from tests.threads import run_ranks

NOW = {"min_elements": 50, "warmup_epochs": 0}


def measured(compressor, schedule=None, steps=4, spoil=False, **options):
    """After each step of rank 0: its statistics, what its state holds unsent, and its own gradient, as vectors."""

    def work(rank, group):
        model, seen = Table(), []
        optimizer, averager = averaged(model, group, compressor, schedule, **options)
        averager.measures_residual = True
        for step in range(steps):
            backward(model, optimizer, rank, step, prescribed_loss)
            if spoil and step == steps - 1:
                model.kernel.grad.fill_(math.inf)
            names = averager.gradients.layout.names
            own = torch.cat([p.grad.reshape(-1) for name, p in model.named_parameters() if name in names])
            averager.step()
            state = averager.state_dict()["memory"]
            unsent = state.get("velocity") or state.get("residual") or {}
            flat = torch.cat([unsent[name].reshape(-1) for name in names]) if unsent else None
            seen.append((averager.stats, flat, own))
        return seen

    return run_ranks(2, work)[0]


@pytest.mark.parametrize(
    "compressor, topology",
    [
        (dgc(clip_norm=1.0), "all_gather"),
        (dgc(), "two_phase"),
        (OneBit(**NOW), "all_gather"),
        (PowerSGD(rank=1, **NOW), "all_gather"),
    ],
)
def test_the_residual_is_compared_with_the_ranks_own_gradient(compressor, topology):
    for stats, unsent, own in measured(compressor, topology=topology):
        assert stats.residual_to_gradient == pytest.approx(float(unsent.norm() / own.norm()), rel=1e-5)
        assert stats.norm_seconds > 0


def test_a_loss_scale_is_not_in_it():
    def work(rank, group):
        recorded = []
        for scale in (1.0, 1024.0):
            model = Table()
            _, averager = averaged(model, group)
            averager.measures_residual = True
            (scale * prescribed_loss(model, rank, 0)).backward()
            averager.average(grad_scale=scale)
            averager.commit()
            recorded.append(averager.stats.residual_to_gradient)
        return recorded

    alone, scaled = run_ranks(2, work)[0]
    assert scaled == pytest.approx(alone, rel=1e-5)


def test_dense_steps_have_none():
    steps = measured(dgc(), schedule=lambda epoch, step: 0.9 if 1 <= step < 3 else 0.0, steps=5)
    recorded = [stats.residual_to_gradient is not None for stats, _, _ in steps]
    assert recorded == [False, True, True, False, False]  # the fourth sends all that is left


@pytest.mark.parametrize("error_feedback", [False, True])
def test_what_remembers_nothing_has_none(error_feedback):
    steps = measured(TernGrad(error_feedback=error_feedback, **NOW))
    assert [stats.residual_to_gradient is not None for stats, _, _ in steps] == 4 * [error_feedback]


def test_a_step_that_overflows_has_none():
    recorded = [stats.residual_to_gradient for stats, _, _ in measured(dgc(), spoil=True)]
    assert all(recorded[:-1]) and recorded[-1] is None


def test_nothing_is_measured_unasked():
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, DGC(sparsity=0.9, **NOW, dense_epochs=0))
        backward(model, optimizer, rank, 0, prescribed_loss)
        averager.step()
        return averager.stats

    stats = run_ranks(2, work)[0]
    assert stats.residual_to_gradient is None and stats.norm_seconds == 0
