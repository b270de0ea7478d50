"""What a worker remembers: nothing is lost between what is sent and what stays, and momentum is torch's SGD's."""

from dataclasses import asdict

import pytest
import torch
from torch import nn

from lightning_gradcomp.compressors.decoded import Dense, Sparse
from lightning_gradcomp.compressors.error_feedback import ErrorFeedback, Gradient
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.updates import SGDRule, SGDVelocity
from tests.averaging.workers import same
from tests.compressors.one_worker import CPU

LAYOUT = Layout(("a", "b"), ((3, 4), (5, 2)))
BOTH = {"a", "b"}
RULES = {
    "plain": SGDRule(momentum=0.9),
    "nesterov": SGDRule(momentum=0.9, nesterov=True),
    "dampening": SGDRule(momentum=0.9, dampening=0.3),
    "decay": SGDRule(momentum=0.9, weight_decay=0.2),
    "nesterov and decay": SGDRule(momentum=0.9, nesterov=True, weight_decay=0.2),
    "dampening and decay": SGDRule(momentum=0.9, dampening=0.3, weight_decay=0.2),
    "no momentum": SGDRule(),
    "dampening without momentum": SGDRule(dampening=0.5),
}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def gradients(steps, n=LAYOUT.n, seed=0):
    return torch.randn(steps, n, generator=torch.Generator().manual_seed(seed))


class Worker:
    """A state, an SGD optimizer (lr=1) of parameters in its layout, and the buffer for what to send."""

    def __init__(self, state, rule=RULES["plain"]):
        self.state, self.layout = state, state.layout
        self.parameters = [nn.Parameter(torch.ones(shape)) for shape in state.layout.shapes]
        self.optimizer = torch.optim.SGD(self.parameters, lr=1.0, **asdict(rule))
        state.attach(self.optimizer, self.parameters)
        self.out = torch.empty(state.layout.n)

    def compensate(self, g):
        """What to send for the flat gradient `g`; of a parameter of NaN there is no gradient."""
        for part, own in zip(g.split(self.layout.sizes), self.out.split(self.layout.sizes), strict=True):
            own.copy_(part) if not part.isnan().all() else own.zero_()
        self.state.compensate(self.out)
        return self.out

    def commit(self, moved=BOTH):
        self.out = self.state.commit(moved, self.out)

    def step(self, g, k=4, moved=BOTH):
        """One committed step that sends the k largest; what was sent, fp32 [n]."""
        out = self.compensate(g)
        indices = out.abs().topk(k).indices.sort().values
        sent = Sparse(indices, out[indices].clone())
        self.state.subtract(sent)
        self.commit(moved)
        flat = torch.zeros(self.layout.n)
        sent.add_to(flat)
        return flat

    def flat(self, kind):
        return self.layout.join(self.state.state_dict()[kind], CPU)

    def weights(self):
        return torch.cat([parameter.detach().view(-1) for parameter in self.parameters])


def velocity(rule=RULES["plain"], masking=True, layout=LAYOUT):
    return Worker(SGDVelocity(masking=masking).start(layout, CPU), rule)


def residual(rule=RULES["plain"], layout=LAYOUT):
    return Worker(Gradient().start(layout, CPU))


both_states = pytest.mark.parametrize("make", [residual, velocity])


# Momentum correction


def torch_step(optimizer, parameters, g):
    """SGD's step with the flat gradient g; the weights before less the weights after."""
    before = torch.cat([parameter.detach().clone().view(-1) for parameter in parameters])
    for parameter, part in zip(parameters, g.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.clone().view(parameter.shape)
    optimizer.step()
    return before - torch.cat([parameter.detach().view(-1) for parameter in parameters])


@rules
def test_updates_are_sgds_when_everything_is_sent(rule):
    """And the momentum is torch's `momentum_buffer`."""
    worker, other = velocity(rule, masking=False), velocity(rule)
    for g in gradients(20):
        sent = worker.step(g, k=LAYOUT.n)
        torch.testing.assert_close(sent, torch_step(other.optimizer, other.parameters, g), rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            for mine, theirs in zip(worker.parameters, other.parameters, strict=True):
                mine.copy_(theirs)
        if rule.momentum:
            buffers = [other.optimizer.state[parameter]["momentum_buffer"].view(-1) for parameter in other.parameters]
            torch.testing.assert_close(worker.flat("momentum"), torch.cat(buffers), rtol=1e-6, atol=1e-6)
    assert not worker.flat("velocity").any()


def test_a_momentum_changed_by_a_schedule_acts_as_in_sgd():
    worker, other = velocity(RULES["nesterov"], masking=False), velocity(RULES["nesterov"])
    for g, momentum in zip(gradients(4), (0.95, 0.9, 0.85, 0.9), strict=True):
        for each in (worker, other):
            each.optimizer.param_groups[0]["momentum"] = momentum
        expected = torch_step(other.optimizer, other.parameters, g)
        torch.testing.assert_close(worker.step(g, k=LAYOUT.n), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masking", [True, False])
@rules
def test_sent_and_kept_are_the_velocity_and_the_gradient(rule, masking):
    """To rounding: sent + v' = v + the momentum-corrected gradient, at every step."""
    worker = velocity(rule, masking)
    started = False
    for g in gradients(30):
        u, v = worker.flat("momentum").double(), worker.flat("velocity").double()
        decayed = g.double() + rule.weight_decay * worker.weights()
        u = rule.momentum * u + (1 - rule.dampening * started) * decayed
        corrected = decayed + rule.momentum * u if rule.nesterov else u if rule.momentum else decayed
        sent = worker.step(g)
        torch.testing.assert_close(sent + worker.flat("velocity").double(), v + corrected, rtol=1e-5, atol=1e-5)
        started = True


def test_masking_stops_the_momentum_of_what_was_sent_alone():
    with_mask, without = velocity(), velocity(masking=False)
    g = gradients(1)[0]
    sent = with_mask.step(g) != 0
    without.step(g)
    assert torch.equal(without.flat("momentum"), g)
    assert torch.equal(with_mask.flat("momentum"), torch.where(sent, 0.0, g))


def test_a_parameter_without_a_gradient_starts_later():
    """Its first gradient is not dampened, as in torch."""
    worker = velocity(SGDRule(momentum=0.9, dampening=0.5))
    first, second = gradients(2)
    worker.compensate(torch.where(torch.arange(LAYOUT.n) < 12, first, torch.nan))
    worker.commit({"a"})
    assert set(worker.state.state_dict()["momentum"]) == {"a"}
    worker.compensate(second)
    worker.commit()
    momentum = worker.flat("momentum")
    torch.testing.assert_close(momentum[:12], 0.9 * first[:12] + 0.5 * second[:12])
    torch.testing.assert_close(momentum[12:], second[12:])


def test_the_optimizers_momentum_is_taken_over():
    worker = velocity(SGDRule(momentum=0.9, dampening=0.5))
    buffer, g = gradients(2)
    slot = worker.optimizer.state[worker.parameters[1]]
    slot["momentum_buffer"] = buffer[12:].view(5, 2)
    assert worker.state.empty
    worker.compensate(g)
    worker.commit()
    assert slot["momentum_buffer"].data_ptr() == worker.state.optimizer_state["momentum_buffer"][12:].data_ptr(), (
        "it is in one place"
    )
    torch.testing.assert_close(worker.flat("momentum"), torch.cat([g[:12], 0.9 * buffer[12:] + 0.5 * g[12:]]))


def test_momentum_is_handed_over_where_parameters_moved():
    worker = velocity()
    worker.step(gradients(1)[0])
    own = worker.flat("momentum")
    momentum = gradients(1, seed=1)[0]
    worker.state.hand_over({"momentum_buffer": momentum}, {"b"})
    state = worker.optimizer.state
    assert torch.equal(state[worker.parameters[1]]["momentum_buffer"], momentum[12:].view(5, 2))
    assert torch.equal(state[worker.parameters[0]]["momentum_buffer"], own[:12].view(3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_momentum_that_is_zeroed_replaced_or_cleared_in_the_optimizer_is_so_here(dtype):
    new = torch.full((5, 2), 2.0, dtype=dtype)
    changes = {
        "zeroed": (lambda held: held["momentum_buffer"].zero_(), 0.0),
        "zeroed by .data": (lambda held: held["momentum_buffer"].data.mul_(0), 0.0),
        "replaced": (lambda held: held.update(momentum_buffer=new.clone()), 0.9 * 2.0),
        "cleared": (lambda held: held.clear(), 0.0),
    }
    for name, (change, momentum) in changes.items():
        if name == "zeroed by .data" and dtype != torch.float32:
            continue  # a copy, whose version counter says nothing of it
        worker, (first, second) = velocity(), gradients(2)
        for parameter in worker.parameters:
            parameter.data = parameter.data.to(dtype)
        worker.step(first)
        change(worker.optimizer.state[worker.parameters[1]])
        worker.step(second)
        sent = worker.flat("momentum")[12:] == 0
        expected = torch.where(sent, 0.0, momentum + second[12:])
        torch.testing.assert_close(worker.flat("momentum")[12:], expected, msg=name)


# Residual and velocity


def test_a_residual_is_what_was_not_sent():
    worker, kept = residual(), torch.zeros(LAYOUT.n)
    for g in gradients(10):
        kept = kept + g
        sent = worker.step(g)
        assert torch.equal(sent, torch.where(sent != 0, kept, 0.0))
        kept = torch.where(sent != 0, 0.0, kept)
        assert torch.equal(worker.flat("residual"), kept)


@both_states
def test_what_rounding_changed_of_sent_values_is_kept(make):
    worker = make()
    out = worker.compensate(gradients(1)[0]).clone()
    indices = torch.tensor([1, 7, 20])
    rounded = out[indices].bfloat16().float()
    worker.state.subtract(Sparse(indices, rounded))
    worker.commit()
    assert torch.equal(worker.state.unsent[indices], out[indices] - rounded)
    assert worker.state.unsent[indices].any()


@both_states
def test_a_step_that_is_not_committed_leaves_no_trace(make):
    worker, other = make(RULES["nesterov"]), make(RULES["nesterov"])
    first, spoiled, second = gradients(3)
    for each in (worker, other):
        each.step(first)
    before = worker.state.state_dict()
    spoiled[3], spoiled[15] = float("nan"), float("inf")
    out = worker.compensate(spoiled)
    worker.state.subtract(Sparse(torch.tensor([3, 4]), out[[3, 4]]))
    assert same(worker.state.state_dict(), before)
    for each in (worker, other):
        each.step(second)
    assert same(worker.state.state_dict(), other.state.state_dict())


@both_states
def test_a_parameter_that_did_not_move_keeps_its_state(make):
    """Although the others' payload was decoded, and subtracted, for all."""
    worker = make()
    first, second = gradients(2)
    worker.step(first)
    before = worker.state.state_dict()
    worker.compensate(torch.where(torch.arange(LAYOUT.n) < 12, second, torch.nan))
    worker.state.subtract(Dense(torch.ones(LAYOUT.n)))
    worker.commit({"a"})
    after = worker.state.state_dict()
    for kind in before:
        assert torch.equal(after[kind]["b"], before[kind]["b"])
        assert not torch.equal(after[kind]["a"], before[kind]["a"])


@both_states
def test_the_buffer_that_commit_returns_is_free(make):
    worker, other = make(), make()
    for g in gradients(4):
        assert torch.equal(worker.step(g), other.step(g))
        worker.out.fill_(torch.nan)
    assert same(worker.state.state_dict(), other.state.state_dict())


@both_states
def test_what_another_rank_remembered_is_absorbed(make):
    worker, alone = make(), make()
    more, g = gradients(2)
    worker.state.absorb(more)
    assert not worker.state.empty
    torch.testing.assert_close(worker.compensate(g), alone.compensate(g) + more)


@both_states
def test_a_state_is_loaded_by_name_into_another_layout(make):
    worker = make()
    for g in gradients(3):
        worker.step(g)
    state = worker.state.state_dict()
    other = make(layout=Layout(("new", "b", "a"), ((6, 1), (5, 2), (3, 4)))).state
    other.load_state_dict(state)
    assert same(other.state_dict(), state)
    back = make()
    back.state.load_state_dict(other.state_dict())
    (g,) = gradients(1, seed=1)
    assert torch.equal(back.step(g), worker.step(g))
    assert same(back.state.state_dict(), worker.state.state_dict())


@both_states
def test_a_state_dict_is_a_copy_and_so_is_what_is_loaded(make):
    worker, other = make(), make()
    worker.step(gradients(1)[0])
    state = worker.state.state_dict()
    kept = {key: {name: part.clone() for name, part in parts.items()} for key, parts in state.items()}
    other.state.load_state_dict(state)
    for each in (worker, other):
        for g in gradients(2, seed=2):
            each.step(g)
    assert same(state, kept)


@both_states
def test_a_cleared_state_is_as_new(make):
    worker, new = make(RULES["dampening"]), make(RULES["dampening"])
    g, later = gradients(2)
    worker.step(g)
    worker.state.clear(BOTH)
    worker.optimizer.state.clear()
    assert worker.state.empty
    assert torch.equal(worker.step(later), new.step(later))
    assert same(worker.state.state_dict(), new.state.state_dict())


def test_a_state_of_nothing_sends_the_gradient_and_stays_empty():
    worker = Worker(ErrorFeedback().start(LAYOUT, CPU))
    for g in gradients(3):
        assert torch.equal(worker.compensate(g), g)
        worker.step(g)
    assert worker.state.empty
    assert worker.state.unsent is None
    assert worker.state.state_dict() == {}


# Chunks


@both_states
@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf, -torch.inf, 3e38])
def test_the_gradient_is_found_finite_or_not(make, value):
    """Although it is overwritten, and the sum of large numbers is infinite."""
    g = gradients(1)[0]
    g[3:5] = value
    assert bool(make().state.compensate(g)) == (abs(value) < torch.inf)


@pytest.mark.parametrize("rule", [RULES["nesterov and decay"], RULES["dampening and decay"]])
def test_chunks_of_several_parameters_decay_as_each_does_in_sgd(rule):
    """Chunks that end inside of a parameter, contiguous or not."""
    layout = Layout(tuple("abcde"), ((5, 3), (1000, 400), (0, 2), (300, 500), (4,)))
    worker, other = velocity(rule, layout=layout), velocity(rule, layout=layout)
    for each in (worker, other):
        for parameter in each.parameters:
            parameter.data = torch.arange(parameter.numel()).div(1e5).view(parameter.shape)
    worker.parameters[1].data = worker.parameters[1].data.t().contiguous().t()
    [g] = gradients(1, layout.n)
    sent = worker.compensate(g)
    torch.testing.assert_close(sent, torch_step(other.optimizer, other.parameters, g), rtol=1e-5, atol=1e-5)
