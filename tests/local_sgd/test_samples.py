"""Averages are weighted by samples; ranks without data or with a NaN; flags and measures in the reports."""

import pytest
import torch

from lightning_gradcomp import EDEN, GradientDropping, Int8
from tests.averaging.methods import EVERY
from tests.averaging.workers import Table, all_equal, backward, bowl_loss, weights
from tests.local_sgd.training import CLOSE, run_ranks, set_up, train

ROUNDING = {"none": 1e-6, "fp16": 0.01, "bf16": 0.01, "int8": 0.04, "eden": 0.2, "gradient_dropping": 1e-6}
"""Compressor -> bound of the relative error of a mean. For EDEN in 4 bits: √(2 · 0.009), and less for what is fp32."""
FEW_BITS = {"int8": lambda: Int8(min_elements=1), "eden": lambda: EDEN(bits=4, min_elements=1)}


@pytest.mark.parametrize("compressor", ROUNDING)
def test_averages_are_weighted_by_samples(compressor):
    def work(rank, group):
        made = {**EVERY, **FEW_BITS}[compressor]()
        model, optimizer, averager = set_up(group, "sgd", period=2, delay=0, compressor=made)
        for step, samples in enumerate([(5, 4), (1, 2)][rank]):
            backward(model, optimizer, rank, step, bowl_loss)
            with averager.stepping(weight=samples):
                optimizer.step()
                own = weights(model)
        return own - weights(Table()), weights(model) - weights(Table())

    (first, got), (second, again) = run_ranks(2, work)
    assert torch.equal(got, again)
    expected = 0.75 * first + 0.25 * second
    if compressor == "gradient_dropping":  # only the small tensors, which are not compressed
        got, expected = got[-19:], expected[-19:]
    error = (got - expected).norm() / expected.norm()
    assert ROUNDING[compressor] / 100 * (compressor in FEW_BITS) < float(error) < ROUNDING[compressor]


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("compressor", ["none", "gradient_dropping"])
def test_a_rank_without_data_has_no_weight(delay, compressor):
    """Rank 1 has no batches from step 4 on: the later updates are rank 0's."""

    def work(rank, group):
        options = {"period": 4, "delay": delay, "compressor": EVERY[compressor]()}
        model, optimizer, averager = set_up(group, "momentum", **options)
        train(model, optimizer, averager, rank, 4)
        averager.drain()
        start, total = weights(model), torch.zeros(679)
        for step in range(4, 15):
            if rank == 0:
                backward(model, optimizer, rank, step, bowl_loss)
                with averager.stepping():
                    before = weights(model)
                    optimizer.step()
                    total += weights(model) - before
            else:
                averager.step(0)
        averager.drain()
        return weights(model), start + total

    (drained, expected), (other, _) = run_ranks(2, work)
    assert torch.equal(drained, other)
    torch.testing.assert_close(drained, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("others", ["rest", "are not finite"])
def test_a_mean_over_senders_leaves_out_ranks_without_samples(others):
    """An entry that only one rank sends moves by that rank's update."""
    resting = others == "rest"

    def work(rank, group):
        sparse = GradientDropping(sparsity=0.8, mean="senders", scope="tensor", min_elements=64, warmup_epochs=0)
        options = {"period": 2, "delay": 0, "error_decay": 0.9, "participation": 0.25 if resting else 1.0}
        model, optimizer, averager = set_up(group, "sgd", compressor=sparse, **options)
        takes_part = not averager.resting if resting else rank == 3
        for step in range(2):
            backward(model, optimizer, rank, step, bowl_loss)
            if not (takes_part or resting):
                model.bias.grad[0] = torch.nan
            with averager.stepping():
                if not averager.resting:
                    optimizer.step()
                own = weights(model)
        return takes_part, own - weights(Table()), weights(model) - weights(Table())

    results = run_ranks(4, work)
    [own] = [own for takes_part, own, _ in results if takes_part]
    for _, _, moved in results:
        sent = moved != 0
        assert sent[:660].float().mean() == pytest.approx(0.2, abs=0.01) and sent[660:].all()
        torch.testing.assert_close(moved[sent], own[sent], **CLOSE)


@pytest.mark.parametrize("delay", [0, 3])
def test_a_rank_with_a_nan_has_no_weight_in_its_round(delay):
    """Rank 1 starts again from the average, and has a weight again in the next round."""

    def work(rank, group, nan):
        model, optimizer, averager = set_up(group, "adamw", period=4, delay=delay)
        for step in range(8):
            backward(model, optimizer, rank, step, bowl_loss)
            if nan and rank == 1 and step == 1:
                model.matrix.grad[3, 4] = torch.nan
            averager.step(0 if not nan and rank == 1 and step < 4 else 1)
        middle = weights(model)
        averager.drain()
        return middle, weights(model)

    got = run_ranks(2, lambda rank, group: work(rank, group, True))
    assert all(tensor.isfinite().all() for pair in got for tensor in pair)
    assert torch.equal(got[0][1], got[1][1])
    if delay == 0:
        spared = run_ranks(2, lambda rank, group: work(rank, group, False))
        # rank 1's Adam moments differ a little between the two runs: only one has gradients for them
        assert float((got[0][1] - spared[0][1]).abs().mean()) < 0.02

    def first_round(rank, group):
        model, optimizer, averager = set_up(group, "adamw", period=4, delay=0)
        train(model, optimizer, averager, 0, 4)  # every rank trains on rank 0's data
        return weights(model)

    def with_nan(rank, group):
        model, optimizer, averager = set_up(group, "adamw", period=4, delay=0)
        for step in range(4):
            backward(model, optimizer, rank, step, bowl_loss)
            if rank == 1:
                model.bias.grad[2] = torch.inf
            averager.step()
        return weights(model)

    torch.testing.assert_close(run_ranks(2, with_nan)[1], run_ranks(2, first_round)[0], **CLOSE)


def test_ranks_with_uneven_data_end_at_the_same_step():
    """Each goes on with `step(0)` until the flags of all are set."""

    def work(rank, group):
        model, optimizer, averager = set_up(group, "momentum", period=4, delay=2)
        batches = iter(range([5, 14, 9][rank]))
        while not all(averager.flags):
            step = next(batches, None)
            averager.flag = step is None
            if step is not None:
                backward(model, optimizer, rank, step, bowl_loss)
            averager.step(0 if step is None else 1)
        averager.drain()
        return weights(model), averager.steps

    results = run_ranks(3, work)
    assert all_equal([drained for drained, _ in results])
    assert {steps for _, steps in results} == {18}  # the round that ends at step 16 is the first with all flags set


def test_consensus_distance_is_that_of_the_round_before():
    def work(rank, group):
        model, optimizer, averager = set_up(group, period=4, delay=2)
        train(model, optimizer, averager, rank, 4)
        first = weights(model).double()
        train(model, optimizer, averager, rank, range(4, 8))
        second = weights(model).double()
        assert averager.spent.consensus_distance == 0
        train(model, optimizer, averager, rank, range(8, 10))  # applies round 2, with the distances of round 1
        return first, second, averager.spent.consensus_distance

    first, second, found = zip(*run_ranks(3, work), strict=True)
    mean = torch.stack(first).mean(0)
    apart = torch.stack([(own - mean).square().sum() for own in first]).mean().sqrt()
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(float(apart / torch.stack(second).mean(0).norm()), rel=1e-4)
