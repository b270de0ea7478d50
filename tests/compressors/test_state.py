"""DGC's memory: momentum as torch's SGD has it, and nothing lost between what is sent and what stays."""

import pytest
import torch

from lightning_gradcomp.compressors.local_gradient import Incoming
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.state import Momentum, Velocity
from lightning_gradcomp.compressors.decoded import Sparse

CPU = torch.device("cpu")
LAYOUT = Layout(("a", "b"), ((3, 4), (5, 2)))
BOTH = {"a", "b"}
RULES = {
    "plain": Momentum(momentum=0.9),
    "nesterov": Momentum(momentum=0.9, nesterov=True),
    "dampening": Momentum(momentum=0.9, dampening=0.3),
    "no momentum": Momentum(),
    "dampening without momentum": Momentum(dampening=0.5),
}


def gradients(steps, n=LAYOUT.n, seed=0):
    return torch.randn(steps, n, generator=torch.Generator().manual_seed(seed))


def velocity(masking=True, layout=LAYOUT):
    return Velocity(layout, CPU, masking=masking)


def compensated(memory, g, rule, moving=BOTH):
    """What to send for the flat gradient `g`."""
    return memory.compensate(Incoming.of(g, memory.layout), [rule] * len(memory.layout.names), moving)


def sparse_step(memory, g, rule, k=4):
    """One committed step that sends the k largest; returns what was sent, as a dense tensor."""
    outgoing = compensated(memory, g, rule)
    indices = outgoing.abs().topk(k).indices.sort().values
    values = outgoing[indices].clone()
    memory.forget(Sparse(indices, values))
    memory.commit()
    return torch.zeros_like(g).index_add_(0, indices, values)


def flat(memory, key):
    return memory.layout.join(memory.state_dict()[key], CPU)


def same(state, other):
    """Whether two states are equal to the bit, names included."""
    return state.keys() == other.keys() and all(
        state[key].keys() == other[key].keys() and all(torch.equal(state[key][n], other[key][n]) for n in state[key])
        for key in state
    )


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_when_everything_is_sent_the_updates_are_those_of_torch_sgd_and_u_is_its_buffer(rule):
    weight = torch.nn.Parameter(torch.zeros(LAYOUT.n))
    sgd = torch.optim.SGD([weight], lr=1.0, momentum=rule.momentum, dampening=rule.dampening, nesterov=rule.nesterov)
    memory = velocity(masking=False)
    for g in gradients(20):
        before = weight.detach().clone()
        weight.grad = g.clone()
        sgd.step()
        sent = sparse_step(memory, g, rule, k=LAYOUT.n)
        torch.testing.assert_close(sent, before - weight.detach(), rtol=1e-5, atol=1e-5)
        if rule.momentum:
            buffer = sgd.state[weight]["momentum_buffer"]
            torch.testing.assert_close(flat(memory, "momentum"), buffer, rtol=1e-6, atol=1e-6)
    assert not flat(memory, "velocity").any()


def test_a_momentum_changed_on_the_way_acts_as_in_torch_sgd():
    weight = torch.nn.Parameter(torch.zeros(LAYOUT.n))
    sgd = torch.optim.SGD([weight], lr=1.0, momentum=0.9, nesterov=True)
    memory = velocity(masking=False)
    for g, momentum in zip(gradients(4), (0.95, 0.9, 0.85, 0.9), strict=True):
        before = weight.detach().clone()
        sgd.param_groups[0]["momentum"] = momentum
        weight.grad = g.clone()
        sgd.step()
        sent = sparse_step(memory, g, Momentum(momentum=momentum, nesterov=True), k=LAYOUT.n)
        torch.testing.assert_close(sent, before - weight.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_sent_and_remembered_are_remembered_before_and_the_corrected_gradient(rule, masking):
    memory = velocity(masking)
    started = False
    for g in gradients(30):
        u, v = flat(memory, "momentum").double(), flat(memory, "velocity").double()
        u = rule.momentum * u + (1 - rule.dampening * started) * g.double()
        corrected = g + rule.momentum * u if rule.nesterov else u if rule.momentum else g.double()
        sent = sparse_step(memory, g, rule)
        torch.testing.assert_close(sent + flat(memory, "velocity").double(), v + corrected, rtol=1e-5, atol=1e-5)
        started = True


def test_what_was_sent_in_full_is_gone_to_the_last_bit():
    memory = velocity()
    for g in gradients(5):
        sent = sparse_step(memory, g, RULES["plain"])
        assert not flat(memory, "velocity")[sent != 0].any()


def test_what_quantising_took_from_the_sent_values_is_remembered():
    memory = velocity()
    outgoing = compensated(memory, gradients(1)[0], RULES["plain"]).clone()
    indices = torch.tensor([1, 7, 20])
    rounded = outgoing[indices].bfloat16().float()
    memory.forget(Sparse(indices, rounded))
    memory.commit()
    assert torch.equal(flat(memory, "velocity")[indices], outgoing[indices] - rounded)
    assert flat(memory, "velocity")[indices].any()


def test_masking_stops_the_momentum_of_what_was_sent_and_of_nothing_else():
    with_mask, without = velocity(True), velocity(False)
    g = gradients(1)[0]
    sent = sparse_step(with_mask, g, RULES["plain"]) != 0
    sparse_step(without, g, RULES["plain"])
    assert torch.equal(flat(without, "momentum"), g)
    assert torch.equal(flat(with_mask, "momentum"), torch.where(sent, 0.0, g))


def test_a_step_that_is_not_committed_leaves_no_trace():
    memory, other = velocity(), velocity()
    first, spoiled, second = gradients(3)
    for books in (memory, other):
        sparse_step(books, first, RULES["nesterov"])
    before = memory.state_dict()
    spoiled[3], spoiled[11] = float("nan"), float("inf")
    outgoing = compensated(memory, spoiled, RULES["nesterov"])
    memory.forget(Sparse(torch.tensor([3, 4]), outgoing[[3, 4]]))
    assert same(memory.state_dict(), before)
    for books in (memory, other):
        sparse_step(books, second, RULES["nesterov"])
    assert same(memory.state_dict(), other.state_dict())


def test_a_parameter_without_a_gradient_starts_when_its_first_gradient_comes():
    memory, rule = velocity(), Momentum(momentum=0.9, dampening=0.5)
    first, second = gradients(2)
    compensated(memory, torch.where(torch.arange(LAYOUT.n) < 12, first, 0.0), rule, {"a"})
    memory.commit()
    assert set(memory.state_dict()["momentum"]) == {"a"}
    compensated(memory, second, rule)
    memory.commit()
    momentum = flat(memory, "momentum")
    torch.testing.assert_close(momentum[:12], 0.9 * first[:12] + 0.5 * second[:12])
    torch.testing.assert_close(momentum[12:], second[12:])


def test_an_adopted_momentum_buffer_goes_on_where_the_optimizer_left_it():
    memory, rule = velocity(), Momentum(momentum=0.9, dampening=0.5)
    buffer, g = gradients(2)
    assert memory.empty
    memory.adopt("b", buffer[12:].view(5, 2))
    assert not memory.empty
    compensated(memory, g, rule)
    memory.commit()
    torch.testing.assert_close(flat(memory, "momentum"), torch.cat([g[:12], 0.9 * buffer[12:] + 0.5 * g[12:]]))


def test_a_state_goes_by_name_into_another_layout():
    memory = velocity()
    for g in gradients(3):
        sparse_step(memory, g, RULES["plain"])
    state = memory.state_dict()
    other = velocity(layout=Layout(("new", "b", "a"), ((6,), (5, 2), (3, 4))))
    other.load_state_dict(state)
    assert same(other.state_dict(), state)
    back = velocity()
    back.load_state_dict(other.state_dict())
    (g,) = gradients(1, seed=1)
    assert torch.equal(sparse_step(back, g, RULES["plain"]), sparse_step(memory, g, RULES["plain"]))
    assert same(back.state_dict(), memory.state_dict())


def test_a_state_dict_is_a_copy_and_so_is_what_is_loaded():
    memory = velocity()
    sparse_step(memory, gradients(1)[0], RULES["plain"])
    state = memory.state_dict()
    kept = {key: {name: part.clone() for name, part in parts.items()} for key, parts in state.items()}
    other = velocity()
    other.load_state_dict(state)
    for books in (memory, other):
        sparse_step(books, gradients(1, seed=2)[0], RULES["plain"])
    assert same(state, kept)


def test_cleared_books_are_as_new():
    memory, new = velocity(), velocity()
    g, later = gradients(2)
    sparse_step(memory, g, RULES["dampening"])
    memory.clear()
    assert memory.empty
    assert torch.equal(sparse_step(memory, later, RULES["dampening"]), sparse_step(new, later, RULES["dampening"]))
    assert same(memory.state_dict(), new.state_dict())
