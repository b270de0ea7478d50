"""With DGC and SGD too, a rank's gradient is computed at the shared weights less what it has not sent itself."""

import pytest
import torch

from lightning_gradcomp.averaging import GradientAverager
from tests.averaging.workers import Table, averaged, dgc, prescribed_loss
from tests.threads import checked_collectives, run_ranks


def test_velocity_is_subtracted_at_each_groups_rate():
    def work(rank, group):
        model = Table()
        first, *others = model.parameters()
        groups = [{"params": [first], "lr": 0.05}, {"params": others, "lr": 0.2}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        averager = GradientAverager(model, dgc(), optimizer=optimizer, process_group=group)
        for step in range(5):
            optimizer.zero_grad()
            with averager.local_weights():
                prescribed_loss(model, rank, step).backward()
            averager.step()
        rates = {id(p): each["lr"] for each in optimizer.param_groups for p in each["params"]}
        shared = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        velocity, moved = averager.state_dict()["memory"]["velocity"], 0
        with averager.local_weights():
            for name, parameter in model.named_parameters():
                if name in velocity:
                    expected = shared[name] - rates[id(parameter)] / 2**0.5 * velocity[name]
                    torch.testing.assert_close(parameter.detach(), expected)
                    moved += not torch.equal(parameter, shared[name])
                else:
                    assert torch.equal(parameter, shared[name])
        assert all(torch.equal(parameter, shared[name]) for name, parameter in model.named_parameters())
        return moved, shared

    (moved, shared), (_, others) = run_ranks(2, work)
    assert moved > 1
    assert all(torch.equal(shared[name], others[name]) for name in shared)


def test_it_settles_where_the_shared_weights_alone_swing():
    """A quadratic bowl: by the time that a velocity is sent, the slope at the shared weights is an old one."""

    def work(rank, group, local):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 32, bias=False)
        optimizer, averager = averaged(model, group, dgc(sparsity=0.98), lr=0.1, momentum=0.9, weight_decay=0.0)
        for _ in range(100):
            optimizer.zero_grad()
            if local:
                averager.use_local_weights()
            model.weight.square().sum().div(2).backward()
            averager.use_shared_weights()
            averager.step()
        return float(model.weight.detach().norm())

    local, shared = (run_ranks(2, lambda rank, group, use=use: work(rank, group, use))[0] for use in (True, False))
    assert local < shared / 2


class Taught(torch.nn.Module):
    """With a frozen copy of the matrix, a buffer, and a parameter that is each rank's own."""

    _ddp_params_and_buffers_to_ignore = ("own",)

    def __init__(self):
        super().__init__()
        self.table = Table()
        self.teacher = torch.nn.Parameter(self.table.matrix.detach().clone(), requires_grad=False)
        self.still = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float64), requires_grad=False)
        self.own = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("seen", torch.zeros(1))

    def follow(self, how):
        if how == "assign":
            self.teacher.data = 0.9 * self.teacher.data + 0.1 * self.table.matrix.data
        elif how == "row":
            with torch.no_grad():
                self.teacher[3] = self.table.matrix[3]
        else:
            self.teacher.data.lerp_(self.table.matrix.data, 0.1)


def taught(rank, group, how, where, **options):
    """What training raises, and where the teacher ends."""
    model = Taught()
    optimizer = torch.optim.SGD(model.table.parameters(), lr=0.1, momentum=0.9)
    averager = GradientAverager(model, dgc(), optimizer=optimizer, process_group=group, **options)
    try:
        for step in range(9):
            optimizer.zero_grad()
            model.own.data += rank
            model.seen += rank
            with averager.local_weights():
                if where == "inside":
                    model.follow(how)
                prescribed_loss(model.table, rank, step).backward()
            averager.step()
            if where == "after":
                model.follow(how)
    except ValueError as error:
        return str(error), None
    return "", model.teacher.detach().clone()


@pytest.mark.parametrize("how", ["assign", "lerp", "row"])
def test_a_teacher_of_local_weights_is_an_error_on_all_ranks(how):
    with checked_collectives(3):
        found = run_ranks(3, lambda rank, group: taught(rank, group, how, "inside")[0])
    assert len(set(found)) == 1
    for part in ("'teacher'", "on_train_batch_end", "local_weights=False"):
        assert part in found[0]


@pytest.mark.parametrize(("where", "options"), [("after", {}), ("inside", {"local_weights": False})])
def test_a_teacher_of_shared_weights_is_the_same_on_all_ranks(where, options):
    (said, first), (_, second) = run_ranks(2, lambda rank, group: taught(rank, group, "lerp", where, **options))
    assert not said
    assert torch.equal(first, second)
    assert not torch.equal(first, Taught().teacher)
