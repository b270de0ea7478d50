"""TernGrad with partitions: owners add up whole numbers and send the sums, so that nothing is rounded on the way."""

from functools import partial

import pytest
import torch

import lightning_gradcomp as lgc
from lightning_gradcomp.averaging.checkpoint_state import PARTITION
from lightning_gradcomp.averaging.exchange import Flags
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.memory import Memory
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.averaging.stats import Stats
from lightning_gradcomp.averaging.step import average_compressed
from lightning_gradcomp.averaging.topology import Topology
from lightning_gradcomp.averaging.traffic import traffic
from lightning_gradcomp.compressors.terngrad import TernGrad
from tests.averaging.laws import Parts, note_sent, parts_loss
from tests.averaging.workers import (
    SGD,
    Table,
    all_equal,
    averaged,
    backward,
    flat_gradients,
    prescribed_loss,
    recorded,
    same,
    train,
    weights,
)
from tests.reference.terngrad_server import Server
from tests.threads import run_ranks, subgroups

SHAPES = {"kernel": (10, 4, 3, 3), "matrix": (12, 25)}
terngrad = partial(TernGrad, min_elements=40, warmup_epochs=0)
topologies = pytest.mark.parametrize("topology", ["two_phase", "server"])


def steps_of(world, compressor, topology, steps=6):
    """For each rank: (its gradient, the average) at every step, and its state at the end."""

    def work(rank, group):
        model = Table()
        return recorded(model, *averaged(model, group, compressor, topology=topology), rank, steps)

    return run_ranks(world, work)


OPTIONS = [{}, {"error_feedback": True}, {"clip_sigma": 0.0, "dense_values": "int8"}]
WORLDS = [
    *((world, topology, each) for world in (2, 3) for topology in ("two_phase", "server") for each in OPTIONS),
    (4, "two_phase", OPTIONS[1]), (4, "server", OPTIONS[2]),
    *((8, "two_phase", each) for each in OPTIONS), (8, "server", OPTIONS[1]),
]  # fmt: skip
"""Every option with either topology on two ranks and three; with more, either topology and every option once."""


@pytest.mark.parametrize(("world", "topology", "options"), WORLDS)
def test_it_is_the_simulation_in_one_process_to_the_bit(world, topology, options):
    steps = 6 if world < 8 else 3
    ranks = steps_of(world, terngrad(**options), topology, steps)
    server = Server(terngrad(**options), SHAPES, world)
    for step in range(steps):
        average = server.step([seen[step][0] for seen, _ in ranks])
        for seen, _ in ranks:
            assert torch.equal(seen[step][1], average)
    for own, (_, state) in zip(server.states, ranks, strict=True):
        theirs = own.state_dict()
        assert same({kind: state[kind] for kind in theirs}, theirs)
        assert PARTITION not in state


@pytest.mark.parametrize("topology", ["all_gather", "two_phase"])
def test_tensors_of_one_size_get_what_each_gets_alone(topology):
    """Small ones are drawn and packed together."""
    shapes = [*[(8, 20)] * 3, (4, 12), *[(5, 9)] * 2, (9, 5)]

    def work(rank, group):
        model, seen = Parts(*shapes), []
        optimizer, averager = averaged(model, group, terngrad(error_feedback=True), topology=topology)
        for step in range(3):
            backward(model, optimizer, rank, step, parts_loss)
            own = torch.cat([part.grad.reshape(-1) for part in model.parts])
            averager.average()
            averager.commit()
            seen.append((own, torch.cat([part.grad.reshape(-1) for part in model.parts])))
        return seen

    ranks, server = run_ranks(2, work), Server(terngrad(error_feedback=True), dict(enumerate(shapes)), 2)
    for step in zip(*ranks, strict=True):
        average = server.step([own for own, _ in step])
        assert all(torch.equal(mean, average) for _, mean in step)


@pytest.mark.parametrize(
    ("world", "topology"), [(2, "two_phase"), (2, "server"), (3, "two_phase"), (3, "server"), (8, "two_phase")]
)
def test_it_is_the_mean_of_an_all_gather_from_the_same_draws(world, topology):
    steps = 6 if world < 8 else 3
    gathered, owned = (steps_of(world, terngrad(), how, steps)[0][0] for how in ("all_gather", topology))
    for (_, mean), (_, other) in zip(gathered, owned, strict=True):
        torch.testing.assert_close(other, mean, rtol=1e-6, atol=1e-6 * float(mean.abs().max()))
        assert mean.any()


def test_with_two_ranks_that_is_so_to_the_bit():
    gathered, owned = (steps_of(2, terngrad(error_feedback=True), how) for how in ("all_gather", "two_phase"))
    for (seen, memory), (other, others) in zip(gathered, owned, strict=True):
        assert all(torch.equal(a[1], b[1]) for a, b in zip(seen, other, strict=True))
        assert same(memory, others)


def test_more_ranks_than_rows():
    def work(rank, group):
        model = torch.nn.Linear(40, 2)
        _, averager = averaged(model, group, terngrad(), topology="two_phase")
        sent = note_sent(averager)
        model.weight.grad = torch.linspace(-1, 1, 80).view(2, 40) * (rank + 1)
        averager.average()
        averager.commit()
        return model.weight.grad, sent[0]["weight"].float()

    means, sent = zip(*run_ranks(3, work), strict=True)
    assert all_equal(means)
    torch.testing.assert_close(means[0], sum(sent) / 3)


@topologies
def test_nodes_are_workers_too(topology):
    """Two nodes of two ranks: the simulation's two workers have the nodes' mean gradients."""

    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, terngrad(), topology=topology, inside="dense", ranks_per_node=2)
        backward(model, optimizer, rank, 0, prescribed_loss)
        own = flat_gradients(model).clone()
        averager.average()
        averager.commit()
        return own, flat_gradients(model), averager.stats.bytes_sent, averager.describe()

    with subgroups():
        own, means, sent, said = zip(*run_ranks(4, work), strict=True)
    average = Server(terngrad(), SHAPES, 2).step([(own[0] + own[1]) / 2, (own[2] + own[3]) / 2])
    assert all(torch.equal(mean, average) for mean in means)
    assert f" {max(sent):,} bytes sent between nodes a step" in said[0]


def test_a_change_of_topology_between_steps_changes_no_draw():
    """Two ranks: with more, the gather's sums are rounded, and these are not."""

    compressor = terngrad(error_feedback=True)

    def work(rank, group):
        models = []
        for topologies in (["all_gather"], ["all_gather", "two_phase", "server"]):
            model = Table()
            optimizer = torch.optim.SGD(model.parameters(), **SGD)
            memory = Memory(compressor, Gradients(model, compressor), Ranks(group), Topology(), optimizer)
            for step in range(6):
                backward(model, optimizer, rank, step, prescribed_loss)
                topology = topologies[step % len(topologies)]
                average = average_compressed(memory, compressor, topology, step, Flags(), Stats())
                average.commit(average.names)
                optimizer.step()
            models.append(weights(model))
        return torch.equal(*models) and not torch.equal(models[0], weights(Table()))

    assert all(run_ranks(2, work))


def test_partition_residuals_of_another_method_go_to_the_workers():
    """What 1-bit's owners remembered is sent by TernGrad's workers; without error feedback it is dropped."""

    def work(rank, group):
        model = Table()
        first = averaged(model, group, lgc.OneBit(min_elements=40, warmup_epochs=0), topology="two_phase")
        train(model, *first, rank, 2, prescribed_loss)
        state, ledgers = first[1].state_dict(), []
        for kept in (False, True):
            optimizer, averager = averaged(model, group, terngrad(error_feedback=kept), topology="two_phase")
            averager.load_state_dict(state)
            backward(model, optimizer, rank, 2, prescribed_loss)
            had = flat_gradients(model).clone()
            averager.average()
            averager.commit()
            after = averager.state_dict()["memory"]
            assert PARTITION not in after and bool(after) == kept
            ledgers.append((had, flat_gradients(model).clone(), after))
        layout = averager.gradients.layout
        own, partition, left = (
            layout.join(parts, torch.device("cpu"))
            for parts in (state["memory"]["residual"], state["memory"][PARTITION], after["residual"])
        )
        return own / 2 + partition + ledgers[1][0] / 2 - left / 2, ledgers[1][1], partition

    with pytest.warns(UserWarning, match="'residual' is lost"):
        owed, came, partitions = zip(*run_ranks(2, work), strict=True)
    assert all_equal(came) and all(partition.any() for partition in partitions)
    torch.testing.assert_close(sum(owed), came[0], rtol=1e-5, atol=1e-5)


def bytes_of_step(world, n, topology):
    """Of n elements in rows of 64, with nothing beside them but flags."""
    gradients = Gradients(Parts((n // 64, 64)), terngrad())
    return traffic(terngrad(), gradients, Ranks(None, world), topology)


@pytest.mark.parametrize(("world", "pull"), [(2, 32 / 13), (4, 32 / 10), (8, 32 / 7), (64, 32 / 4)])
def test_bits_an_element_are_what_the_docs_say(world, pull):
    n = 64 * 65_536
    for topology, back in (("two_phase", pull), ("server", 32)):
        assert 8 * bytes_of_step(world, n, topology) / n == pytest.approx((world - 1) / world * (1.6 + back), rel=1e-3)
