"""Why a run has compressed nothing, and what the log says before: dense steps that come first."""

import pytest

import lightning_gradcomp as lgc
from tests.averaging.simulated_clock import EACH, simulated_clock, timed_steps
from tests.averaging.workers import Table, averaged, prescribed_loss, train
from tests.local_sgd import training
from tests.threads import run_ranks


def onebit(**options):
    return lgc.OneBit(**{"min_elements": 50, "warmup_steps": 0, **options})


RUNS = {
    "compressed": (2, onebit(warmup_steps=4), {}, ""),
    "a baseline": (2, "none", {}, ""),
    "steps": (2, onebit(warmup_steps=5), {}, "its warm-up of 5 dense steps lasted to the end"),
    "an epoch": (2, onebit(warmup_steps=None, warmup_epochs=1), {"epoch": 0}, "its warm-up of 1 dense epoch lasted"),
    "no sparsity": (2, lgc.DGC(sparsity=0.0, min_elements=50), {}, "its sparsity was 0"),
    "alone": (1, onebit(), {}, "there is one rank"),
    "small": (2, onebit(min_elements=10**6), {}, "no tensor is large enough"),
    "wide": (2, onebit(groups="block", group_size=1), {}, "a compressed step costs no fewer bytes than a dense one"),
    "a trial": (2, onebit(), {"topology": "auto"}, 'topology="auto" had not chosen yet'),
}
"""Ranks, what compresses, options, and why none of five steps was compressed."""


@pytest.mark.parametrize(("world", "compressor", "options", "why"), RUNS.values(), ids=RUNS)
def test_a_run_that_has_compressed_nothing_knows_why(world, compressor, options, why):
    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, compressor, **options)
        train(model, optimizer, averager, rank, 5, prescribed_loss)
        return averager.why_uncompressed()

    assert all(said.startswith(why) and bool(said) == bool(why) for said in run_ranks(world, work))


@pytest.mark.filterwarnings("ignore:.*Steps are dense")
@pytest.mark.parametrize(
    ("compressed", "why"), [(0.5, ""), (2.0, 'topology="auto" found dense steps the fastest')], ids=["gain", "loss"]
)
def test_steps_of_a_trial_do_not_count(compressed, why):
    def work(rank, group):
        model = Table()
        parts = model, *averaged(model, group, onebit(), topology="auto")
        timed_steps(parts, rank, clock, range(3 * EACH), lambda what, _: 1.0 if what == "dense" else compressed)
        return parts[2].why_uncompressed()

    with simulated_clock() as clock:
        assert run_ranks(2, work) == [why, why]


@pytest.mark.parametrize(
    ("warmup_steps", "period", "steps", "why"),
    [
        (8, 4, 12, ""),
        (8, 4, 8, "its warm-up of 2 dense rounds lasted to the end"),
        (0, 4, 3, "no round of 4 steps ended before a drain"),
    ],
)
def test_dense_rounds_have_the_dense_steps(warmup_steps, period, steps, why):
    def work(rank, group):
        compressor = onebit(warmup_steps=warmup_steps)
        model, optimizer, averager = training.set_up(group, compressor=compressor, period=period, delay=0)
        said = averager.describe()
        training.train(model, optimizer, averager, rank, steps)
        averager.drain()
        return said, averager.why_uncompressed()

    for said, reason in training.run_ranks(2, work):
        assert ("2 dense rounds first" in said) == bool(warmup_steps)
        assert reason == why


def test_the_log_says_how_many_dense_steps_come_first():
    def described(compressor, **options):
        return run_ranks(2, lambda rank, group: averaged(Table(), group, compressor, **options)[1].describe())[0]

    assert described(lgc.OneBit(min_elements=50)).startswith("OneBit: 22 dense steps, then 2 tensors (")
    assert described(lgc.DGC(dense_epochs=1, min_elements=50), epoch=0).startswith("DGC: 1 dense epoch, then ")
    assert "then" not in described(onebit())
