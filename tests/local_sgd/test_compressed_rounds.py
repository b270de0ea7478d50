"""Compressed rounds: ranks stay equal, error feedback keeps the sums, and the bytes are those of the collectives."""

import pytest
import torch

from lightning_gradcomp.averaging.exchange import CALLER_FLAGS
from lightning_gradcomp.local_sgd.rounds import report_bytes
from tests.averaging.methods import REMEMBERING
from tests.averaging.workers import Table, all_equal, backward, bowl_loss, weights
from tests.local_sgd.training import run_ranks, set_up, train
from tests.threads import checked_collectives, short_sum

WITH_ERROR_FEEDBACK = {name: make for name, make in REMEMBERING.items() if "," not in name}
"""With default options."""


CASES = {f"{name}, 0": (make, 0) for name, make in WITH_ERROR_FEEDBACK.items()} | {
    f"{name}, 3": (WITH_ERROR_FEEDBACK[name], 3) for name in ("dgc", "onebit", "powersgd")
}


@pytest.mark.parametrize(("make", "delay"), CASES.values(), ids=CASES)
def test_compressed_rounds_keep_sums_and_ranks_equal(make, delay):
    def work(rank, group):
        model, made, averager = set_up(group, "nesterov", compressor=make(), period=4, delay=delay)
        total = torch.zeros(len(weights(model)), dtype=torch.float64)
        between = []
        for step in range(20):
            backward(model, made, rank, step, bowl_loss)
            with averager.stepping():
                before = weights(model).double()
                made.step()
                total += weights(model).double() - before
            if step % 4 == 3:
                between.append(weights(model))
        averager.drain()
        return total, torch.stack(between), weights(model)

    totals, between, drained = (torch.stack(parts) for parts in zip(*run_ranks(3, work), strict=True))
    assert all_equal(drained)
    assert all_equal(between) == (delay == 0)
    expected = weights(Table()).double() + totals.mean(0)
    torch.testing.assert_close(drained[0].double(), expected, rtol=1e-4, atol=2e-5)
    if delay == 0:  # or there would be no residual that the drain could add
        assert float((between[0, -1].double() - expected).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_16_bit_rounds_take_half_the_bytes(name):
    def work(rank, group, compressor):
        model, made, averager = set_up(group, compressor=compressor, period=4, delay=4)
        train(model, made, averager, rank, 20)
        sent = averager.spent.bytes_sent
        averager.drain()
        return weights(model), sent

    got, sent = zip(*run_ranks(3, lambda rank, group: work(rank, group, name)), strict=True)
    expected, dense = zip(*run_ranks(3, lambda rank, group: work(rank, group, "none")), strict=True)
    assert all_equal(got)
    assert 1.9 < dense[0] / sent[0] < 2  # the reports are not compressed
    error = float((got[0] - expected[0]).norm() / (expected[0] - weights(Table())).norm())
    assert 0 < error < 0.01


def test_each_round_has_one_exchange():
    def work(rank, group):
        model, optimizer, averager = set_up(group, period=4, delay=3)
        log[rank].clear()
        train(model, optimizer, averager, rank, 23)
        return averager.spent

    with checked_collectives(3) as log:
        stats = run_ranks(3, work)
        message = 4 * (len(weights(Table())) + len(list(Table().parameters())) + CALLER_FLAGS)  # one number each
        gradients = 4 * len(weights(Table()))
        assert log[0] == [("all_to_all_single", report_bytes(4)), *short_sum(3, message)] * 5
    assert stats[0].rounds == 5
    assert stats[0].bytes_sent == 5 * (2 * report_bytes(4) + round(4 / 3 * gradients))
