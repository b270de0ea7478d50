"""Compressors with an `average` of their own that exchange otherwise than the ones of this package."""

from dataclasses import dataclass

import pytest
import torch

from lightning_gradcomp.averaging.topology import messages, traffic
from lightning_gradcomp.compressors import OneBit
from lightning_gradcomp.compressors.decoded import Dense
from tests.averaging.methods import finite, kept, quick
from tests.averaging.workers import Table, all_equal, averaged, backward, prescribed_loss, same, train, weights
from tests.threads import GATHERS, checked_collectives, run_ranks

WHY = "it is for tests"


@dataclass(kw_only=True)
class GathersTwice(OneBit):
    """bf16, in two halves."""

    not_partitioned_because = WHY

    def messages(self, layout):
        return [("gather", 2 * (layout.n // 2)), ("gather", 2 * (layout.n - layout.n // 2))]

    def average(self, flat, layout, collectives, state):
        sent, means = flat.bfloat16(), []
        for half in (sent[: layout.n // 2], sent[layout.n // 2 :]):
            rows = [row.view(torch.bfloat16).float() for row in collectives.gather(half.view(torch.uint8))]
            means.append(sum(rows) / collectives.workers)
        return Dense(torch.cat(means)), Dense(sent.float())


@dataclass(kw_only=True)
class MaximumAlone(OneBit):
    """The largest element of each tensor, of any worker; its own is what a worker has sent."""

    not_partitioned_because = WHY

    def messages(self, layout):
        return [("maximum", 4 * len(layout.sizes))]

    def average(self, flat, layout, collectives, state):
        own = torch.stack([flat[start:stop].max() for start, stop in layout.bounds])
        sizes = torch.tensor(layout.sizes)
        return tuple(Dense(each.repeat_interleave(sizes)) for each in (collectives.maximum(own), own))


@dataclass(kw_only=True)
class Nothing(OneBit):
    """No message at all."""

    not_partitioned_because = WHY

    def messages(self, layout):
        return []

    def average(self, flat, layout, collectives, state):
        return Dense(torch.zeros_like(flat)), Dense(torch.zeros_like(flat))


COMPRESSORS = {"gathers twice": GathersTwice, "maximum alone": MaximumAlone, "nothing": Nothing}
every = pytest.mark.parametrize("cls", COMPRESSORS.values(), ids=COMPRESSORS)


@every
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dense_values", ["fp32", "bf16"])
def test_announced_bytes_are_what_collectives_are_given(cls, world, dense_values):
    compressor = quick(cls, dense_values=dense_values)

    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, compressor)
        announced = [(how == "gather", length) for how, length in messages(compressor, averager.gradients)]
        for number in range(3):
            backward(model, optimizer, rank, number, prescribed_loss)
            averager.check_same_parameters()
            log[rank].clear()
            averager.step()
            assert [(how in GATHERS, length) for how, length in log[rank]] == announced
            sent = traffic(compressor, averager.gradients, averager.ranks, "all_gather")
            assert averager.stats.bytes_sent == averager.stats.bytes_received == sent < averager.stats.dense_bytes
            assert f" {sent:,} bytes sent a step" in averager.describe()
        return weights(model)

    with checked_collectives(world) as log:
        assert all_equal(run_ranks(world, work))


@every
def test_dense_gradients_are_averaged_and_replicas_stay_equal(cls):
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, quick(cls))
        for step in range(6):
            backward(model, optimizer, rank, step, prescribed_loss)
            own = [p.grad.clone() for p in (model.small, model.bias)]
            averager.flag = (rank, step) == (1, 4)
            averager.step()
            assert averager.flagged == (step == 4)
        assert finite(averager, model)
        return weights(model), own, [model.small.grad, model.bias.grad]

    values, own, came = zip(*run_ranks(3, work), strict=True)
    assert all_equal(values)
    for owns, means in zip(zip(*own, strict=True), zip(*came, strict=True), strict=True):
        assert all_equal(means)
        torch.testing.assert_close(means[0], sum(owns) / 3)


@every
def test_what_is_not_sent_is_sent_by_a_dense_step(cls):
    def work(rank, group):
        model, owed = Table(), 0
        optimizer, averager = averaged(model, group, quick(cls), lambda epoch, step: 0.9 * (step < 4), momentum=0.0)
        for step in range(5):
            backward(model, optimizer, rank, step, prescribed_loss)
            had = model.matrix.grad.double()
            averager.average()
            averager.commit()
            owed = owed + had - model.matrix.grad
        assert not averager.has_unsent
        return owed

    if cls is not MaximumAlone:  # what it applies is not the mean of what is sent
        owed = run_ranks(2, work)
        assert float(sum(owed).abs().max()) <= 1e-4


@every
def test_a_gradient_that_is_not_finite_is_seen_by_all(cls):
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, quick(cls))
        train(model, optimizer, averager, rank, 2, prescribed_loss)
        before = averager.state_dict()["memory"]
        backward(model, optimizer, rank, 2, prescribed_loss)
        if rank == 1:
            model.small.grad[0, 0] = torch.nan
        averager.average()
        averager.commit()
        assert not model.kernel.grad.isfinite().any() and not model.bias.grad.isfinite().any()
        return same(averager.state_dict()["memory"], before)

    assert all(run_ranks(2, work))


@every
def test_a_parameter_that_no_rank_uses_stays(cls):
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, quick(cls))
        for step in range(4):
            before, remembered = model.matrix.detach().clone(), kept(averager)
            backward(model, optimizer, rank, step, prescribed_loss)
            if step > 1 or rank:
                model.matrix.grad = None
            averager.step()
        assert torch.equal(model.matrix, before)
        return torch.equal(kept(averager)["matrix"], remembered["matrix"])

    assert all(run_ranks(2, work))
