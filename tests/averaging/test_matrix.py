"""The laws of every method with one cell for each code path (cells.py)."""

import math
from functools import cache, partial

import pytest
import torch

from lightning_gradcomp.averaging.exchange import CALLER_FLAGS
from lightning_gradcomp.compressors import LossyCompressor
from tests.averaging.cells import (
    CELLS,
    DENSE_STEP,
    END,
    NODE,
    OPTIMIZERS,
    Cell,
    Ledger,
    differences,
    end_of,
    load,
    on,
    straight,
)
from tests.averaging.methods import EVERY, LOSSY, with_defaults
from tests.averaging.workers import (
    Table,
    all_equal,
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

ALONE = {label: cell for label, cell in CELLS.items() if cell.per_node == 1}
SCALED = {label: cell for label, cell in with_defaults(ALONE).items() if cell.topology == "all_gather"}
SCALED["all_gather-sgd-dgc,clip_norm=30"] = Cell(partial(LOSSY["dgc"], clip_norm=30.0))
"""A loss scale is removed before anything is clipped and encoded, and restored after everything is decoded."""


# Dense limit

DENSE_STEPS = 6
"""Fifty are in test_dense_limit.py."""
DENSE = {
    f"{topology}{'-nodes' * (per_node > 1)}-{optimizer}": Cell(dgc, topology, per_node, optimizer)
    for topology in ("all_gather", "two_phase", "server")
    for per_node in (1, NODE)
    for optimizer in ("sgd", "adamw")
} | {f"all_gather-sgd-{label}": Cell(EVERY[label]) for label in ("onebit", "powersgd", "none")}
"""The averager does dense steps itself: a method of each kind of state."""
DENSE["all_gather-adamw-none"] = Cell(EVERY["none"], optimizer="adamw")


@cache
def with_ddp(world, optimizer):
    def work(rank, group):
        model = conv_net()
        train_ddp(model, OPTIMIZERS[optimizer](model.parameters()), group, rank, DENSE_STEPS)
        return weights(model)

    return run_ranks(world, work)[0]


@on(DENSE)
def test_with_nothing_dropped_it_is_ddp_with_the_users_optimizer(cell):
    def work(rank, group):
        parts = cell.begin(group, conv_net(), lambda epoch, step: 0.0)
        train(*parts, rank, DENSE_STEPS, image_loss)
        return weights(parts[0])

    got = cell.run(work)
    assert all_equal(got)
    assert float((got[0] - with_ddp(cell.world, cell.optimizer)).abs().max()) <= 1e-6


# Replicas never drift


@on(CELLS)
def test_replicas_are_equal_to_the_bit_after_every_step(cell):
    start, ranks = weights(Table()), straight(cell)
    for step in range(END):
        assert all_equal([rank.weights[step] for rank in ranks])
        assert not torch.equal(ranks[0].weights[step], ranks[0].weights[step - 1] if step else start)
    for rank in ranks:
        parts = [part for parts in rank.end.values() for part in parts.values() if part.is_floating_point()]
        assert all(bool(part.isfinite().all()) for part in parts)


# Honest numbers, one shape on all ranks (`straight` compares what ranks put into collectives)


@on(ALONE)
def test_reported_bytes_are_what_collectives_carried_and_what_was_announced(cell):
    """A dense step reports its gradients, but not the one extra number per parameter and flag."""
    ranks, flags = straight(cell), 4 * 3 * (len(list(Table().parameters())) + CALLER_FLAGS)
    for step in range(END):
        sent, received, carried = zip(*(rank.traffic[step] for rank in ranks), strict=True)
        assert sum(sent) == sum(received)
        if step == DENSE_STEP or not isinstance(cell.make(), LossyCompressor):
            assert all(those - flags <= own <= those for own, those in zip(sent, carried, strict=True))
        else:
            assert f" {max(sent):,} bytes sent a step" in ranks[0].said
            assert sum(sent) == pytest.approx(sum(carried), abs=0.1)
            assert cell.topology != "all_gather" or sent == received == carried


# A resumed run is the straight run


@on(CELLS)
def test_a_resumed_run_is_the_straight_run_to_the_bit(cell):
    expected = straight(cell)

    def work(rank, group):
        ends = []
        for stop, checkpoint in expected[rank].saved.items():
            parts = cell.begin(group)
            load(parts, checkpoint)
            train(*parts, rank, range(stop, END), prescribed_loss)
            ends.append((stop, end_of(parts)))
        return ends

    for ends, rank in zip(cell.run(work), expected, strict=True):
        for stop, end in ends:
            assert not differences(end, rank.end), f"stopped at {stop}"


# What no step uses leaves no trace

OVERFLOWS = {0: math.nan, 3: math.inf, DENSE_STEP: -math.inf, DENSE_STEP + 1: math.nan}
"""Before the first step, a compressed one, the dense one and the one after it; each on a different rank and tensor."""
UNUSED = (2, DENSE_STEP)


@on(CELLS)
def test_averages_that_are_not_finite_or_not_used_leave_no_trace(cell):
    """As when a GradScaler skips a step. At the end a non-finite average is committed nevertheless."""

    def overflow(parts, rank, number, value):
        model, optimizer, averager = parts
        backward(model, optimizer, rank, 1000, prescribed_loss)
        if rank == number % cell.world:
            [model.kernel, model.small, model.matrix, model.bias][number % 4].grad.view(-1)[7] = value
        averager.average()
        assert not all(bool(p.grad.isfinite().all()) for p in model.parameters()), f"rank {rank} does not see it"

    def work(rank, group):
        parts = model, optimizer, averager = cell.begin(group)
        for step in range(END):
            before = end_of(parts)
            if step in UNUSED:
                backward(model, optimizer, rank, 900, prescribed_loss)
                averager.average()
                assert not differences(end_of(parts), before), f"rank {rank} keeps an average before it is used"
            if step in OVERFLOWS:
                overflow(parts, rank, list(OVERFLOWS).index(step), OVERFLOWS[step])
                assert not differences(end_of(parts), before), f"rank {rank} keeps non-finite values"
            backward(model, optimizer, rank, step, prescribed_loss)
            averager.step()
        end, before = end_of(parts), averager.state_dict()["memory"]
        overflow(parts, rank, 1, math.inf)
        averager.commit()
        assert not differences(averager.state_dict()["memory"], before)
        return end

    for end, rank in zip(cell.run(work), straight(cell), strict=True):
        assert not differences(end, rank.end)


# A loss scale


@on(SCALED)
def test_a_loss_scale_changes_no_bit(cell):
    """The scale changes from step to step; powers of two cause no rounding."""

    def work(rank, group):
        parts = model, optimizer, averager = cell.begin(group)
        for step in range(END):
            scale = 2.0 ** (10 - 3 * (step % 4))
            backward(model, optimizer, rank, step, lambda *given, scale=scale: scale * prescribed_loss(*given))
            averager.average(grad_scale=scale)
            for parameter in model.parameters():
                parameter.grad /= scale
            optimizer.step()
        return end_of(parts)

    for end, rank in zip(cell.run(work), straight(cell), strict=True):
        assert not differences(end, rank.end)


# Random numbers are each rank's own


@pytest.mark.parametrize("name", ["terngrad", "qsgd"])
@pytest.mark.parametrize("topology", ["all_gather", "two_phase"])
def test_ranks_that_have_the_same_gradient_round_it_differently(name, topology):
    def work(rank, group):
        ledger = Ledger(Cell(LOSSY[name], topology).begin(group))
        ledger.go(0, [0])
        return ledger.model.matrix.grad.abs()

    def alone(rank, group):
        ledger = Ledger(Cell(LOSSY[name]).begin(group))
        ledger.go(0, [0], lambda *given: (rank == 0) * prescribed_loss(*given))
        return ledger.model.matrix.grad.abs()

    assert len(run_ranks(3, work)[0].unique()) > len(run_ranks(3, alone)[0].unique())
