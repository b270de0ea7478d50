"""The numbers are honest: what is reported is what is handed to the collective, and it is never more than dense."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_gradcomp.averaging.exchange import CALLER_FLAGS
from lightning_gradcomp.averaging.ranks import Ranks
from lightning_gradcomp.compressors import DGC, OneBit
from lightning_gradcomp.compressors.kernels.elias_fano import index_bytes
from lightning_gradcomp.compressors.kernels.topk import count
from lightning_gradcomp.compressors.schedules import Ramp, exponential
from tests.averaging.simulated_clock import SimulatedClock
from tests.averaging.workers import SHAPES, Table, averaged, backward, dgc, prescribed_loss
from tests.threads import GATHERS, checked_collectives, run_ranks, short_sum

ELEMENTS = sum(torch.Size(shape).numel() for shape in SHAPES)


def steps_of(world, schedule, steps):
    """For every rank, and every step of it: the statistics, and (collective, bytes put in) of what was exchanged."""

    def work(rank, group):
        model, seen = Table(), []
        optimizer, averager = averaged(model, group, schedule=schedule)
        averager.check_same_parameters()
        for step in range(steps):
            backward(model, optimizer, rank, step, prescribed_loss)
            before = len(log[rank])
            averager.step()
            seen.append((averager.stats, log[rank][before:]))
        return seen

    with checked_collectives(world) as log:
        return run_ranks(world, work)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("sparsity", [0.75, 0.9, 0.99])
def test_a_sparse_step_is_one_gather_and_reports_it(world, sparsity):
    for rank in steps_of(world, lambda epoch, step: sparsity, 3):
        for stats, [(collective, length)] in rank:
            assert collective in GATHERS
            assert stats.bytes_sent == stats.bytes_received == (world - 1) * length
            assert stats.sparsity == sparsity


def test_a_compressed_step_of_a_method_without_a_sparsity_reports_none():
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, OneBit(min_elements=40, warmup_steps=1))
        seen = []
        for step in range(2):
            backward(model, optimizer, rank, step, prescribed_loss)
            averager.step()
            seen.append(averager.stats.sparsity)
        return seen

    assert run_ranks(2, work) == [[0, None]] * 2


def test_a_message_is_dense_values_payload_and_flags():
    k = count(360, 0.1) + count(300, 0.1)
    least = 4 * (9 + 10) + 4 * k + index_bytes(660, k)
    [(_, [(_, length)])] = steps_of(2, lambda epoch, step: 0.9, 1)[0]
    assert least <= length <= least + 8


@pytest.mark.parametrize("world", [2, 3])
def test_a_dense_step_is_one_sum_and_reports_a_rings_traffic(world):
    for rank in steps_of(world, lambda epoch, step: 0.0, 3):
        for stats, exchanged in rank:
            flags = 1 + len(SHAPES) + CALLER_FLAGS  # more than there are
            assert exchanged in [short_sum(world, 4 * (ELEMENTS + more)) for more in range(flags + 1)]
            ring = round(2 * (world - 1) / world * 4 * ELEMENTS)
            assert stats.bytes_sent == stats.bytes_received == stats.dense_bytes == ring
            assert stats.sparsity == 0


@pytest.mark.parametrize(("device", "sent"), [("cpu", 2 * 2 * 136), ("cuda", 533)])
def test_a_short_sum_is_padded_to_equal_parts_a_ring_is_not(device, sent):
    ranks = Ranks(None, 3)
    assert ranks.add_traffic(400, torch.device(device)) == sent


def test_the_return_to_dense_reports_the_momentum_it_sends():
    stats, [(collective, length)] = steps_of(2, lambda epoch, step: 0.9 if step < 2 else 0.0, 3)[0][-1]
    assert [(collective, length)] == short_sum(2, length)
    assert stats.bytes_sent == pytest.approx(length, abs=64)
    assert stats.bytes_sent > stats.dense_bytes


@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_would_cost_more_than_dense_goes_dense(world):
    levels = [0.01, 0.2, 0.35, 0.5, 0.65, 0.8, 0.99]

    def alone(sparsity):
        return steps_of(world, lambda epoch, step: sparsity, 1)[0][0][0]

    stats = [alone(sparsity) for sparsity in levels]
    assert all(one.bytes_sent <= one.dense_bytes for one in stats)
    for level, one in zip(levels, stats, strict=True):
        assert one.sparsity == (level if one.bytes_sent < one.dense_bytes else 0)
    assert stats[0].sparsity == 0
    assert stats[-1].sparsity == 0.99
    assert stats[-1].ratio == stats[-1].dense_bytes / stats[-1].bytes_sent > 1


def test_every_phase_of_a_step_is_timed():
    for stats, _ in steps_of(2, lambda epoch, step: 0.9, 2)[0]:
        assert set(stats.seconds) == {"compress", "exchange", "decompress"}
        assert all(0 < seconds < 10 for seconds in stats.seconds.values())


class FailsOnce(DGC):
    failed = False

    def select(self, flat, layout):
        if not FailsOnce.failed:
            raise MemoryError
        return super().select(flat, layout)


def test_a_failed_step_adds_no_time_to_the_next_one(monkeypatch):
    clock = SimulatedClock()
    monkeypatch.setattr("lightning_gradcomp.averaging.stats.time", SimpleNamespace(perf_counter=clock))

    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, FailsOnce(sparsity=0.9, start_sparsity=0.9, min_elements=50))
        backward(model, optimizer, rank, 0, prescribed_loss)
        with pytest.raises(MemoryError):
            averager.step()
        dist.barrier(group)
        FailsOnce.failed, clock.now = True, 1000.0
        averager.step()
        return sum(averager.spent.seconds.values())

    assert run_ranks(2, work) == [0, 0]


def test_a_schedule_gets_the_epoch_and_the_step():
    def work(rank, group):
        model, seen = Table(), []
        options = {"sparsity": 0.99, "dense_epochs": 1, "warmup_epochs": 2}
        optimizer, averager = averaged(model, group, dgc(**options), steps_per_epoch=2)
        for step in range(9):
            backward(model, optimizer, rank, step, prescribed_loss)
            averager.step()
            seen.append(averager.stats.sparsity)
        return seen

    low, high = exponential(0.99, 2)
    assert run_ranks(2, work)[0] == [0, 0, low, low, high, high, 0.99, 0.99, 0.99]


@pytest.mark.parametrize("topology", ["all_gather", "auto"])
def test_the_schedule_is_asked_once_a_step(topology):
    """In compressed steps, in dense ones, and in steps of several backward passes; however often it is looked at."""

    def work(rank, group):
        model, asked = Table(), []

        def schedule(epoch, step):
            asked.append((epoch, step))
            return 0.9 * (2 <= step < 6)

        options = {"schedule": schedule, "steps_per_epoch": 3, "topology": topology}
        optimizer, averager = averaged(model, group, **options)
        for step in range(9):
            optimizer.zero_grad()
            for part in range(1 + step % 2):
                decision = averager.begin_step()
                prescribed_loss(model, rank, step + part).backward()
            assert averager.begin_step() is decision is averager.decision
            averager.step()
        return asked

    assert run_ranks(2, work) == [[(step // 3, step) for step in range(9)]] * 2


def test_an_epoch_that_is_set_is_the_epoch():
    def work(rank, group):
        model, seen = Table(), []
        for steps_per_epoch in (None, 2):
            options = {"steps_per_epoch": steps_per_epoch, "epoch": 0}
            optimizer, averager = averaged(model, group, dgc(dense_epochs=1), **options)
            for averager.epoch in (0, 0, 0, 1, 0):
                backward(model, optimizer, rank, 0, prescribed_loss)
                averager.step()
                seen.append(averager.stats.sparsity)
        return seen

    assert run_ranks(2, work)[0] == [0, 0, 0, 0.9, 0] * 2


def test_a_warm_up_in_uncounted_epochs_is_refused():
    message = r"steps_per_epoch.*: got None, allowed: steps_per_epoch=.*warmup_epochs=0"
    for options in ({"dense_epochs": 1}, {"warmup_epochs": 2}):
        with pytest.raises(ValueError, match=message):
            averaged(Table(), None, dgc(**options))


def test_a_later_schedule_in_uncounted_epochs_is_refused():
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group)
        backward(model, optimizer, rank, 0, prescribed_loss)
        with pytest.raises(ValueError, match="steps_per_epoch"):
            averager.schedule = Ramp((0.5,), 0.9, dense=1)
            averager.step()

    run_ranks(2, work)


@pytest.mark.parametrize("wrong", [1.0, -0.1, float("nan")])
def test_a_schedule_out_of_range_is_refused(wrong):
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, schedule=lambda epoch, step: wrong)
        backward(model, optimizer, rank, 0, prescribed_loss)
        averager.step()

    with pytest.raises(ValueError, match=r"sparsity: got .*, allowed: 0 <= sparsity < 1"):
        run_ranks(2, work)


def test_an_unknown_topology_is_refused():
    with pytest.raises(ValueError, match=r"topology: got 'star', allowed: .*'auto'.*'all_gather'"):
        averaged(Table(), None, topology="star")
