"""topology="auto" lets messages travel as a model of the link finds quickest, alike on all ranks, and says why."""

import pytest
import torch

import lightning_gradcomp as lgc
from lightning_gradcomp.averaging import auto
from lightning_gradcomp.averaging.cost import Link, Work
from lightning_gradcomp.averaging.trial import COUNTED, UNCOUNTED
from tests.averaging.laws import LOSSY
from tests.averaging.workers import Table, all_equal, averaged, backward, prescribed_loss, train, weights
from tests.threads import run_ranks

NARROW, FAR = Link(latency=0.0, bandwidth=1e6), Link(latency=1.0, bandwidth=1e9)
"""Links on which bytes count, and on which messages that wait for each other do."""
SOME_WORK = Work(encode=1e-3, decode=1e-3)
DENSE_STEPS = UNCOUNTED + COUNTED
pytestmark = pytest.mark.filterwarnings("ignore:.*Steps are dense")


@pytest.fixture
def measured(monkeypatch):
    """A function that sets what every rank will have measured."""

    def as_if(link, work=SOME_WORK):
        monkeypatch.setattr(auto, "measure_link", lambda group, device: link)
        monkeypatch.setattr(auto, "measure_work", lambda compressor, gradients, group: work)

    return as_if


def compressing(group, compressor=None, **options):
    """A model, optimizer and averager that compress from the first step on, whatever the trial would find."""
    model = Table()
    optimizer, averager = averaged(model, group, compressor, topology="auto", **options)
    averager.trial = None
    return model, optimizer, averager


@pytest.mark.parametrize(("link", "expected"), [(NARROW, "two_phase"), (FAR, "all_gather")])
@pytest.mark.parametrize("name", ["dgc", "gradient_dropping", "onebit", "twobit"])
def test_bytes_decide_where_the_link_is_narrow_and_round_trips_where_it_is_long(name, link, expected, measured):
    measured(link)

    def work(rank, group):
        model, optimizer, averager = compressing(group, LOSSY[name]())
        train(model, optimizer, averager, rank, 2, prescribed_loss)
        return averager.topology, averager.stats.bytes_sent, averager.describe()

    def fixed(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, LOSSY[name](), topology=expected)
        train(model, optimizer, averager, rank, 2, prescribed_loss)
        return averager.stats.bytes_sent

    sent_by_fixed = run_ranks(4, fixed)
    for (topology, sent, said), sent_too in zip(run_ranks(4, work), sent_by_fixed, strict=True):
        assert (topology, sent) == (expected, sent_too)
        assert f"auto: {expected} (modelled: all_gather " in said and ", two_phase " in said
        assert f"latency of {1e3 * link.latency:.2f} ms, {8e-6 * link.bandwidth:,.0f} Mbit/s" in said


@pytest.mark.parametrize("decode", [0.0, 1.0])
def test_so_does_the_work_of_decoding_everybodys_payload(decode, measured):
    """Eight ranks decode seven payloads, or one and its mean: two messages that wait for each other cost less."""
    measured(Link(latency=1.0, bandwidth=1e9), Work(encode=0.0, decode=decode))
    topologies = run_ranks(8, lambda rank, group: compressing(group)[2].topology_at(0.1))
    assert topologies == ["two_phase" if decode else "all_gather"] * 8


@pytest.mark.parametrize("make", [LOSSY["powersgd"], LOSSY["dgc"]], ids=["powersgd", "dgc"])
def test_what_is_measured_is_the_same_on_all_ranks_and_leaves_no_gradient(make):
    def work(rank, group):
        model, _, averager = compressing(group, make())
        assert all(parameter.grad is None for parameter in model.parameters())
        return averager.auto.state_dict(), averager.topology_at(0.1), averager.memory.empty

    states, topologies, empty = zip(*run_ranks(3, work), strict=True)
    assert all(state == states[0] for state in states) and len(set(topologies)) == 1 and all(empty)
    assert all(seconds >= 0 for seconds in states[0]["work"].values()) and states[0]["link"]["bandwidth"] > 0


def test_nothing_is_lost_when_a_schedules_next_level_travels_another_way(measured):
    """On this link half of everything goes to owners, a tenth to everyone; what owners remembered goes back."""
    measured(Link(latency=6e-4, bandwidth=1e6), Work(encode=0.0, decode=0.0))
    levels = [0.5] * 5 + [0.9] * 4 + [0.5] * 3

    def work(rank, group):
        schedule = lambda epoch, step: levels[step]  # noqa: E731
        model, optimizer, averager = compressing(group, schedule=schedule, momentum=0.0)
        had = came = 0
        travelled = []
        for step in range(len(levels)):
            backward(model, optimizer, rank, step, prescribed_loss)
            had = had + torch.cat([model.kernel.grad.flatten(), model.matrix.grad.flatten()]).double()
            averager.average()
            came = came + torch.cat([model.kernel.grad.flatten(), model.matrix.grad.flatten()]).double()
            travelled.append(averager.topology)
        memory = averager.state_dict()["memory"]
        own = sum(torch.cat([parts["kernel"].flatten(), parts["matrix"].flatten()]) for parts in [memory["velocity"]])
        layout = averager.gradients.layout
        return had, came, own.double(), layout.join(memory["owned"], torch.device("cpu")).double(), travelled

    ranks = run_ranks(4, work)
    had, came, own, owned, travelled = zip(*ranks, strict=True)
    assert travelled[0] == ["two_phase"] * 5 + ["all_gather"] * 4 + ["two_phase"] * 3
    assert all_equal(came)
    difference = sum(had) / 4 - came[0] - sum(own) / 4 - sum(owned)
    assert difference.abs().max() <= 1e-5 * sum(had).abs().max()


def test_a_resumed_run_chooses_as_the_whole_one_whatever_it_measures(measured):
    def begun(rank, group):
        model, optimizer, averager = compressing(group)
        train(model, optimizer, averager, rank, 3, prescribed_loss)
        averager.trial = None
        return averager.state_dict()

    def resumed(rank, group):
        model = Table()
        _, averager = averaged(model, group, topology="auto")
        chosen = averager.topology_at(0.1)
        averager.load_state_dict({**states[rank], "trial": averager.trial.state_dict()})
        return chosen, averager.topology_at(0.1)

    measured(NARROW)
    states = run_ranks(4, begun)
    measured(FAR)
    assert run_ranks(4, resumed) == [("all_gather", "two_phase")] * 4


def test_more_traffic_than_dense_is_counted_for_the_topology_that_is_chosen(measured):
    """A quarter of all elements, from each of 8 ranks to every other, would be more than a dense ring."""
    measured(NARROW)

    def work(rank, group):
        schedule = lambda epoch, step: 0.75  # noqa: E731
        chosen = compressing(group, schedule=schedule)[2]
        _, fixed = averaged(Table(), group, schedule=schedule, topology="all_gather")
        return chosen.sparsity, fixed.sparsity

    assert run_ranks(8, work) == [(0.75, 0.0)] * 8


def test_the_trial_compares_dense_with_what_was_chosen(measured):
    measured(NARROW)

    def work(rank, group):
        model = Table()
        optimizer, averager = averaged(model, group, topology="auto")
        seen = []
        for step in range(2 * DENSE_STEPS):
            backward(model, optimizer, rank, step, prescribed_loss)
            averager.step()
            seen.append(averager.stats.sparsity)
        return seen, averager.topology, averager.trial.outcome, weights(model)

    ranks = run_ranks(4, work)
    for seen, topology, outcome, _ in ranks:
        assert seen == [0.0] * DENSE_STEPS + [0.9] * DENSE_STEPS
        assert topology == "two_phase" and outcome.startswith("Steps are ")
    assert all_equal([result[-1] for result in ranks])


def test_baselines_have_nothing_to_choose():
    def work(rank, group):
        averager = lgc.GradientAverager(Table(), "fp16", process_group=group, topology="auto")
        return averager.auto, averager.trial, averager.topology

    assert run_ranks(2, work) == [(None, None, "all_reduce")] * 2
