"""What is sent and what is left is what there was: over worlds, topologies, nodes, dense steps and frozen layers."""

from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch

from lightning_gradcomp.averaging import mean_state
from lightning_gradcomp.compressors import LossyCompressor
from tests.averaging.cells import CELLS, LOSSLESS, NODE, Ledger, differences, on
from tests.averaging.methods import REMEMBERING, finite
from tests.averaging.workers import all_equal, prescribed_loss
from tests.compressors.examples import RandomK


def legs(cell):
    """Successive (ranks, cell): with different owners, nodes and numbers of ranks."""
    alone = replace(cell, per_node=1)
    other = replace(alone, topology="all_gather" if cell.topology != "all_gather" else "two_phase")
    if cell.make().not_partitioned_because is not None:
        other = alone
    if cell.per_node == 1:
        return [(4, cell), (4, other), (2, cell), (3, cell)]
    gathered = replace(cell, topology="all_gather")
    apart = [(4, alone), (4, cell), (4, replace(gathered, per_node=1))]  # only what the ranks of a node share
    return [*apart, (4, cell), (4, gathered), (6, cell), (4, alone), (3, other)]


@on(LOSSLESS)
def test_nothing_is_lost_from_world_to_world(cell):
    """Applied + mean of the workers' states + owners' residuals = mean of all gradients. A dense step sends all."""
    steps, there_was, applied, states, journey = 3, 0, 0, None, legs(cell)

    def work(rank, group, leg, number, states):
        last = number == len(journey) - 1
        dense = (number + 1) * steps
        ledger = Ledger(leg.begin(group, schedule=lambda epoch, step: 0.9 * (step != dense)))
        if states:
            ledger.averager.load_state_dict(states[rank])
        ledger.go(rank, range(number * steps, dense))
        noted = ledger.had, ledger.came, *ledger.left(), ledger.averager.state_dict()
        if last:
            ledger.go(rank, [dense])
        return noted, (ledger.had, ledger.came, *ledger.left())

    for number, (world, leg) in enumerate(journey):
        ranks = leg.run(partial(work, leg=leg, number=number, states=deepcopy(states)), world)
        for noted in zip(*ranks, strict=True):
            had, came, own, owners, *rest = zip(*noted, strict=True)
            assert all_equal(came)
            wanted = there_was + sum(had) / world
            left = sum(own) / world + sum(owners) / leg.per_node
            assert float((wanted - applied - came[0] - left).norm() / wanted.norm()) <= 1e-6, f"leg {number}"
            if rest:
                assert left.norm() > 0.01 * wanted.norm(), "everything was sent, so nothing could be lost"
                exact = isinstance(cell.make(), RandomK) or getattr(cell.make(), "values", "") in (None, "fp32")
                by_owners = leg.topology == "two_phase" and not exact
                assert not by_owners or any(bool(part.any()) for part in owners), "owners keep what they round off"
                [states] = rest
                then = wanted, applied + came[0]
        there_was, applied = then
        if leg.per_node > 1:
            for rank in range(0, world, NODE):
                assert not differences(states[rank]["memory"], states[rank + 1]["memory"])
        assert states[0]["steps"] == (number + 1) * steps
        if number + 1 < len(journey) and journey[number + 1][0] != world:
            states = [mean_state(states)] * journey[number + 1][0]
    assert not left.any(), "a dense step sends everything"


OWN = {label: cell for label, cell in LOSSLESS.items() if cell.per_node == 1 and "," not in label}
del OWN["all_gather-sgd-powersgd"]  # every rank subtracts the mean of all


@on(OWN)
def test_a_rank_without_gradients_sends_and_keeps_nothing_of_the_others(cell):
    """Each rank keeps only its own residual, so the sum is not just right on average."""

    def work(rank, group):
        ledger = Ledger(cell.begin(group))
        ledger.go(rank, range(3), lambda *given: (rank == 1) * prescribed_loss(*given))
        return ledger.left()[0]

    first, second, third = cell.run(work)
    assert second.any() and not first.any() and not third.any()


# Layers that are frozen and unfrozen

FREEZES = {
    label: cell for label, cell in CELLS.items() if cell.optimizer == "sgd" and isinstance(cell.make(), LossyCompressor)
}
FREEZES = {
    label: replace(cell, optimizer="plain") for label, cell in FREEZES.items() if "," not in label or "bf16" in label
}


@on(FREEZES)
def test_nothing_is_lost_when_layers_are_frozen_and_unfrozen(cell):
    """A frozen layer's residual waits until the layer trains. Partitions are cut anew, and replicas stay equal."""
    trains = {"kernel": lambda step: not 4 <= step < 7, "matrix": lambda step: step >= 2, "bias": lambda step: step > 3}

    def work(rank, group):
        ledger = Ledger(cell.begin(group, schedule=lambda epoch, step: 0.9))
        model, averager = ledger.model, ledger.averager
        for step in range(10):
            for name, when in trains.items():
                model.get_parameter(name).requires_grad_(when(step))
            before = averager.state_dict()["memory"]
            ledger.go(rank, [step])
            after = averager.state_dict()["memory"]
            if not model.kernel.requires_grad:
                owned = {kind for kind in before if "kernel" in before.get("partition_residual", {})}
                for kind in before.keys() - owned:  # or the worker took over the owner's
                    assert "kernel" not in before[kind] or torch.equal(after[kind]["kernel"], before[kind]["kernel"])
        assert finite(averager, model)
        return ledger.had, ledger.came, *ledger.left()

    had, came, own, owners = zip(*cell.run(work), strict=True)
    assert all_equal(came)
    if cell.make in REMEMBERING.values() or cell.make().dense_values != "fp32":
        wanted, left = sum(had) / cell.world, sum(own) / cell.world + sum(owners) / cell.per_node
        assert left.norm() > 0
        assert float((wanted - came[0] - left).norm() / wanted.norm()) <= 1e-6
