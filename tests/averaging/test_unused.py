"""Parameters that some ranks do not use, or none does: every rank still takes part in every exchange."""

import pytest
import torch
from torch import nn

from tests.averaging.cells import FEW
from tests.averaging.methods import LOSSY, REMEMBERING, kept, without_momentum
from tests.averaging.workers import (
    Table,
    all_equal,
    averaged,
    backward,
    dgc,
    filled,
    prescribed_loss,
    same,
    seeded,
    train,
    train_ddp,
    weights,
)
from tests.threads import checked_collectives, run_ranks


class Branches(nn.Module):
    """Rank 0 uses the first branch, the others the second; nobody uses the third."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(12, 10)
        self.branches = nn.ModuleList(nn.Linear(10, 8) for _ in range(3))
        filled(self)

    def forward(self, x, branch):
        return self.branches[branch](torch.tanh(self.trunk(x))).square().mean()


def own_branch_loss(model, rank, step):
    return model(torch.randn(5, 12, generator=seeded(rank, step)), int(rank > 0))


@pytest.mark.parametrize("options", [{}, {"nesterov": True, "weight_decay": 0.1}], ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_at_sparsity_0_unused_parameters_are_as_in_ddp(world, options):
    def ours(rank, group):
        model = Branches()
        train(model, *averaged(model, group, dgc(sparsity=0.0), **options), rank, 20, own_branch_loss)
        return weights(model)

    def ddp(rank, group):
        model = Branches()
        optimizer, _ = averaged(model, group, **options)
        train_ddp(model, optimizer, group, rank, 20, own_branch_loss, find_unused_parameters=True)
        return weights(model)

    got, expected = run_ranks(world, ours), run_ranks(world, ddp)
    assert all_equal(got)
    assert float((got[0] - expected[0]).abs().max()) <= 1e-6


@pytest.mark.parametrize("world", [2, 3])
def test_a_parameter_unused_on_some_ranks_is_averaged(world):
    def work(rank, group):
        model = Branches()
        start = model.branches[2].weight.detach().clone()
        optimizer, averager = averaged(model, group)
        for step in range(6):
            backward(model, optimizer, rank, step, own_branch_loss)
            assert (model.branches[0].weight.grad is None) == (rank > 0)
            averager.step()
            assert all(p.grad is not None for branch in model.branches[:2] for p in branch.parameters())
            assert all(p.grad is None for p in model.branches[2].parameters())
        assert torch.equal(model.branches[2].weight, start)
        assert not torch.equal(model.branches[0].weight, Branches().branches[0].weight)
        return weights(model)

    assert all_equal(run_ranks(world, work))


def on_topologies(makes):
    """Default options alone, by all_gather, and some by two_phase."""
    cases = {
        f"{topology}-{label}": (make, topology)
        for topology in ("all_gather", "two_phase")
        for label, make in makes.items()
        if "," not in label and (topology == "all_gather" or label in FEW)
    }
    return pytest.mark.parametrize(("make", "topology"), cases.values(), ids=cases)


def of_matrix(averager):
    """Kind -> what this rank remembers of the matrix."""
    memory = averager.state_dict()["memory"]
    return {kind: {"matrix": parts["matrix"]} for kind, parts in memory.items() if "matrix" in parts}


@on_topologies(LOSSY)
def test_a_parameter_unused_on_all_ranks_stays_as_in_ddp(make, topology):
    """Neither momentum nor weight decay nor what is remembered moves it, and what is remembered is kept."""

    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, make(), topology=topology, nesterov=True, weight_decay=0.1)
        for step in range(6):
            used, kernel, matrix = step < 3, model.kernel.detach().clone(), model.matrix.detach().clone()
            remembered = of_matrix(averager)
            backward(model, optimizer, rank, step, prescribed_loss)
            if not used:
                model.matrix.grad = None
            averager.step()
            assert averager.stats.bytes_sent < averager.stats.dense_bytes
            assert torch.equal(model.matrix, matrix) != used
            assert (model.matrix.grad is not None) == used
            assert used or same(of_matrix(averager), remembered)
            assert not torch.equal(model.kernel, kernel)
        return weights(model)

    assert all_equal(run_ranks(2, work))


@on_topologies(REMEMBERING)
def test_an_unused_parameters_residual_is_sent_later(make, topology):
    """In part as soon as any rank uses it again, and the rest in the first dense step, even if none uses it then."""
    unused, zero, dense = (3, 4), 5, 7

    def work(rank, group):
        model, left = Table(), torch.zeros(12, 25)
        schedule = lambda epoch, step: 0.9 * (step < dense)  # noqa: E731
        optimizer, averager = without_momentum(model, group, make(), schedule, topology=topology)
        for step in range(dense + 1):
            backward(model, optimizer, rank, step, prescribed_loss)
            if step in (*unused, dense) or (step == zero and rank):
                model.matrix.grad = None
            elif step == zero:
                model.matrix.grad.zero_()
            had = 0 if model.matrix.grad is None else model.matrix.grad.clone()
            averager.average()
            averager.commit()
            assert (model.matrix.grad is None) == (step in unused)
            if step not in unused:
                assert model.matrix.grad.any()
                left = left + had - model.matrix.grad
            assert ("matrix" in kept(averager)) == (step < dense)
        assert averager.begin_step().is_plain
        return model.matrix.grad, left

    came, left = zip(*run_ranks(2, work), strict=True)
    assert all_equal(came)
    assert float((sum(left) / 2).abs().max()) <= 2e-5


def test_a_rank_that_compressed_nothing_returns_to_dense_too():
    """Every rank must then do the same collective, also one that has nothing to remember."""

    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, schedule=lambda epoch, step: 0.9 if step < 2 else 0.0)
        for step in range(4):
            backward(model, optimizer, rank, step, prescribed_loss)
            if rank == 1:
                model.kernel.grad = model.matrix.grad = None
            averager.step()
        return weights(model)

    with checked_collectives(2):
        assert all_equal(run_ranks(2, work))


def test_weight_decay_acts_as_in_ddp_where_some_ranks_lack_it():
    """As in DDP, where it acts once on the averaged gradient. Sparse steps, then a dense one that sends the rest."""
    decay, learning_rate, steps = 0.5, 1e-3, 20
    sparsities = [0.75] * (steps - 1) + [0.0]

    def work(rank, group):
        model = Table()
        start = model.kernel.detach().clone()
        options = {"lr": learning_rate, "momentum": 0.0, "weight_decay": decay}
        optimizer, averager = averaged(model, group, None, lambda epoch, step: sparsities[step], **options)
        for _ in range(steps):
            backward(model, optimizer, rank, 0, lambda *given: 0 * prescribed_loss(*given))
            if rank == 1:
                model.kernel.grad = None
            averager.step()
        return float(((start - model.kernel.detach()) / start).mean())

    decayed = 1 - (1 - learning_rate * decay) ** steps
    assert run_ranks(2, work)[0] == pytest.approx(decayed, rel=0.1)
