"""The user's optimizer stays the user's: taken over inside its step, and never seen to be."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from lightning_gradcomp import Int8, OneBit
from lightning_gradcomp.averaging import GradientAverager
from tests.averaging.workers import HAS_MUON, Table, averaged, backward, dgc, muon_adamw, prescribed_loss, weights
from tests.threads import run_ranks

KEYS = ("lr", "momentum", "dampening", "nesterov", "weight_decay")


def seen(optimizer):
    """What a scheduler or monitor sees: identities of all the containers, and every value."""
    identities = [id(optimizer.param_groups)]
    for group in optimizer.param_groups:
        identities += [id(group), id(group["params"]), *(id(parameter) for parameter in group["params"])]
    values = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return identities, values


def two_groups(model):
    first = {"params": [model.kernel, model.small], "weight_decay": 0.1}
    second = {"params": [model.matrix, model.bias], "momentum": 0.5, "nesterov": True}
    return torch.optim.SGD([first, second], lr=0.02, momentum=0.9)


def on_two_ranks(watch, schedule=lambda epoch, step: 0.9 if 2 <= step < 5 else 0.0):
    """`watch(optimizer, take_step)` around each of 8 steps: dense, sparse, dense; results of rank 0, one a step."""

    def work(rank, group):
        model = Table()
        optimizer = two_groups(model)
        averager = GradientAverager(model, dgc(), optimizer=optimizer, process_group=group)
        averager.schedule, results = schedule, []
        for step in range(8):
            backward(model, optimizer, rank, step, prescribed_loss)
            results.append(watch(optimizer, averager.step))
        return results

    return run_ranks(2, work)[0]


def test_groups_are_the_same_objects_after_every_step():
    def watch(optimizer, take_step):
        before = seen(optimizer)
        take_step()
        return before, seen(optimizer)

    for before, after in on_two_ranks(watch):
        assert before == after


def test_also_when_the_optimizers_step_raises():
    class Interrupted(Exception):
        pass

    def interrupt(*_):
        raise Interrupted

    def watch(optimizer, take_step):
        before, hook = seen(optimizer), optimizer.register_step_pre_hook(interrupt)
        with pytest.raises(Interrupted):
            take_step()
        hook.remove()
        return before, seen(optimizer)

    for before, after in on_two_ranks(watch):
        assert before == after


def test_inside_a_step_hooks_see_the_groups_as_they_are():
    def watch(optimizer, take_step):
        inside = []
        hooks = [
            optimizer.register_step_pre_hook(lambda stepping, *_: inside.append(seen(stepping))),
            optimizer.register_step_post_hook(lambda stepping, *_: inside.append(seen(stepping))),
        ]
        before = seen(optimizer)
        take_step()
        for hook in hooks:
            hook.remove()
        return inside == [before, before]

    assert all(on_two_ranks(watch))


def test_the_optimizer_can_be_saved_and_loaded_at_every_step():
    def watch(optimizer, take_step):
        take_step()
        optimizer.load_state_dict(optimizer.state_dict())
        return sorted(optimizer.state_dict()["state"])

    assert all(set(known) <= {0, 1, 2, 3} for known in on_two_ranks(watch))


def test_a_parameter_that_the_module_steps_by_its_own_gradient_is_an_error_on_all_ranks():
    def work(rank, group):
        model = Table()
        optimizer = torch.optim.SGD([model.matrix, model.bias], lr=0.02)
        averager = GradientAverager(model, OneBit(min_elements=50), optimizer=optimizer, process_group=group)
        with pytest.raises(ValueError, match=r"'kernel', which on rank 1 is not rank 0's.*: an optimizer that has it"):
            for step in range(4):
                model.zero_grad()
                prescribed_loss(model, rank, step).backward()
                averager.step()
                model.kernel.data.sub_(0.02 * model.kernel.grad)

    run_ranks(2, work)


class OfCopies(torch.optim.Optimizer):
    """Keeps copies of the weights in its groups, which it steps by the model's gradients."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        super().__init__([p.detach().clone() for p in self.parameters], {"lr": 0.02})

    @torch.no_grad()
    def step(self):
        for copied, p in zip(self.param_groups[0]["params"], self.parameters, strict=True):
            p.copy_(copied.sub_(0.02 * p.grad))


@pytest.mark.parametrize("compressor", [OneBit(min_elements=50), Int8(min_elements=50)], ids=["onebit", "int8"])
def test_an_optimizer_of_copies_gets_averages_and_error_feedback_says_that_it_compresses_nothing(compressor):
    def work(rank, group):
        model = Table()
        optimizer = OfCopies(model)
        averager = GradientAverager(model, compressor, optimizer=optimizer, process_group=group)
        for step in range(4):
            model.zero_grad()
            prescribed_loss(model, rank, step).backward()
            averager.step()
        return weights(model), averager.steps, averager.spent.ratio, averager.why_uncompressed()

    plain = Table()
    for step in range(4):
        losses = [prescribed_loss(plain, rank, step) for rank in (0, 1)]
        gradients = [torch.autograd.grad(loss, list(plain.parameters())) for loss in losses]
        with torch.no_grad():
            for p, *own in zip(plain.parameters(), *gradients, strict=True):
                p.sub_(0.02 * torch.stack(own).mean(0))
    warned = pytest.warns(UserWarning, match="none of the model's parameters, so all gradients are averaged unc")
    with warned if isinstance(compressor, OneBit) else nullcontext():
        (values, steps, ratio, reason), (others, *_) = run_ranks(2, work)
    assert torch.equal(values, others) and steps == 4
    if isinstance(compressor, OneBit):
        assert torch.allclose(values, weights(plain)) and ratio == 1 and "none of the model's parameters" in reason
    else:
        assert torch.allclose(values, weights(plain), atol=0.01) and ratio > 2


class SGDSubclass(torch.optim.SGD):
    """Who knows what its step does."""


class AdamSubclass(torch.optim.AdamW):
    """The same."""


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda parameters: None, "None"),
        (partial(torch.optim.AdamW, amsgrad=True), "amsgrad"),
        (partial(torch.optim.Adam, maximize=True), "maximize"),
        (partial(torch.optim.Adam, lr=torch.tensor(0.1)), "tensor"),
        (torch.optim.RMSprop, "RMSprop"),
        (torch.optim.LBFGS, "LBFGS"),
        (SGDSubclass, "SGDSubclass"),
        (AdamSubclass, "AdamSubclass'"),
        (partial(torch.optim.SGD, maximize=True), "maximize"),
        *[(muon_adamw, "MuonAdamW")] * HAS_MUON,
    ],
)
def test_dgc_refuses_optimizers_that_it_does_not_know(make, got):
    model = Table()
    with pytest.raises(ValueError, match=rf"the optimizer of DGC: got .*{got}.*, allowed: .*SGD"):
        GradientAverager(model, dgc(), optimizer=make(model.parameters()))


def test_others_take_any_optimizer_and_average_needs_none():
    model = Table()
    GradientAverager(model, "none", optimizer=torch.optim.Adam(model.parameters())).step()
    averager = GradientAverager(model, "none")
    averager.average()
    averager.commit()
    with pytest.raises(ValueError, match="no optimizer"):
        averager.step()


@pytest.mark.parametrize("implementation", [{"foreach": True}, {"fused": True}], ids=lambda option: next(iter(option)))
def test_every_implementation_of_sgd_takes_the_same_steps(implementation):
    def work(rank, group, **options):
        model = Table()
        optimizer, averager = averaged(model, group, nesterov=True, weight_decay=0.1, **options)
        for step in range(6):
            backward(model, optimizer, rank, step, prescribed_loss)
            averager.step()
        return weights(model)

    ours, expected = run_ranks(2, partial(work, **implementation)), run_ranks(2, work)
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-6, atol=1e-6)
