"""The cost model against exchanges that are played out, against figures worked out by hand, and its laws."""

from collections import Counter

import pytest

from lightning_gradcomp.app.plan import cost
from lightning_gradcomp.app.plan.cost import Link, Work, compressed_seconds, dense_seconds, exposed
from lightning_gradcomp.app.plan.forecast import steps_at
from lightning_gradcomp.averaging.workers import SHORT, SHORT_SUM
from lightning_gradcomp.compressors.schedules import Ramp
from tests.threads import short_sum

LINK = Link(latency=1e-3, bandwidth=1e8)
NOTHING = Work(0.0, 0.0)
WORLDS = [2, 3, 4, 8, 64]


def ring(rounds, chunk, workers, link):
    """Seconds until the last rank has ended `rounds` rounds, in each of which it needs its neighbour's last one."""
    done = [0.0] * workers
    for _ in range(rounds):
        done = [max(done[rank], done[rank - 1]) + link.latency + chunk / link.bandwidth for rank in range(workers)]
    return max(done)


@pytest.mark.parametrize("workers", WORLDS)
def test_a_dense_exchange_is_a_ring_played_out(workers):
    size = 4_000_000 * workers
    played = ring(2 * (workers - 1), size / workers, workers, LINK)
    assert dense_seconds(size, workers, LINK) == pytest.approx(played)


@pytest.mark.parametrize("workers", WORLDS)
def test_a_long_gather_is_a_ring_and_a_short_one_waits_once(workers):
    for size in (SHORT, SHORT + 1):
        sent = (workers - 1) * size
        if size > SHORT or workers == 2:
            played = ring(workers - 1, size, workers, LINK)
        else:
            played = LINK.latency + sum(size / LINK.bandwidth for _ in range(workers - 1))
        messages = [("gather", size)]
        assert compressed_seconds("all_gather", sent, messages, workers, LINK, NOTHING) == pytest.approx(played)


@pytest.mark.parametrize("workers", WORLDS)
@pytest.mark.parametrize("size", [1000, SHORT_SUM, SHORT_SUM + 1])
def test_a_long_sum_is_a_ring_and_a_short_one_two_messages(workers, size):
    part, sent = size / workers, 2 * (workers - 1) / workers * size
    if size > SHORT_SUM:
        played = ring(2 * (workers - 1), part, workers, LINK)
    elif workers == 2:
        played = LINK.latency + size / LINK.bandwidth
    else:
        at_once = LINK.latency + sum(part / LINK.bandwidth for _ in range(workers - 1))
        played = at_once + (at_once if part <= SHORT else ring(workers - 1, part, workers, LINK))
    messages = [("mean", size)]
    seconds = compressed_seconds("all_gather", sent, messages, workers, LINK, NOTHING)
    assert seconds == pytest.approx(played, abs=1 / LINK.bandwidth)  # bytes are whole


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_a_short_sum_waits_once_for_each_of_its_messages(workers):
    assert cost.short_sum_hops(1000, workers) == len(short_sum(workers, 1000))


def test_by_hand():
    work = Work(encode=0.03, decode=0.01)
    gather, means = [("gather", 100_000)], [("mean", 50_000), ("mean", 70_000)]
    long_means = [("mean", 50_000), ("mean", 4_000_000)]
    # 0.03 to encode, 3 others' payloads to decode, 3 ms of wire, a hop
    assert compressed_seconds("all_gather", 300_000, gather, 4, LINK, work) == pytest.approx(
        0.03 + 0.03 + 0.003 + 0.001
    )
    # to owners and back, a hop each; encoded once and a quarter, decoded twice
    assert compressed_seconds("two_phase", 150_000, gather, 4, LINK, work) == pytest.approx(
        0.0375 + 0.02 + 0.0015 + 0.002
    )
    # the dense quarter comes back from each owner, 10 MB, as a ring: a hop there and three back
    sent = 75_000 + 3 * 10_000_000
    assert compressed_seconds("server", sent, gather, 4, LINK, work) == pytest.approx(0.03 + 0.02 + sent / 1e8 + 0.004)
    # two sums of two hops; averages are not decoded rank by rank
    assert compressed_seconds("all_gather", 180_000, means, 4, LINK, work) == pytest.approx(0.03 + 0.0018 + 0.004)
    # between two ranks, a hop each
    assert compressed_seconds("all_gather", 120_000, means, 2, LINK, work) == pytest.approx(0.03 + 0.0012 + 0.002)
    # a sum of two hops and a ring of six; only what is no ring travels as gathers do
    slow = Link(1e-3, 1e8, gathers=0.5)
    assert compressed_seconds("all_gather", 6_075_000, long_means, 4, slow, work) == pytest.approx(
        0.03 + 0.06 + 0.0015 + 0.008
    )
    # TernGrad: a small ring first
    both = [("maximum", 400), *gather]
    assert compressed_seconds("all_gather", 300_600, both, 4, LINK, work) == pytest.approx(0.06 + 0.003006 + 0.007)


@pytest.mark.parametrize("topology", ["all_gather", "two_phase", "server"])
def test_a_better_link_is_quicker_and_more_work_slower(topology):
    messages, work = [("gather", 1_000_000)], Work(0.03, 0.01)

    def seconds(link=LINK, work=work, sent=3_000_000):
        return compressed_seconds(topology, sent, messages, 4, link, work)

    assert seconds(Link(1e-3, 2e8)) < seconds() < seconds(Link(1e-3, 5e7))
    assert seconds(Link(5e-4, 1e8)) < seconds() < seconds(Link(2e-3, 1e8))
    assert seconds(Link(1e-3, 1e8, gathers=0.5)) > seconds()
    assert seconds(work=Work(0.02, 0.01)) < seconds() < seconds(work=Work(0.03, 0.02))
    assert seconds(sent=2_000_000) < seconds()


@pytest.mark.parametrize(("size", "as_gathers"), [(1000, True), (SHORT_SUM + 4, False)])
def test_short_sums_travel_as_gathers_and_long_ones_do_not(size, as_gathers):
    slow = Link(1e-3, 1e8, gathers=0.5)
    means = "all_gather", 3 * size // 2, [("mean", size)], 4
    assert (compressed_seconds(*means, slow, NOTHING) > compressed_seconds(*means, LINK, NOTHING)) == as_gathers


def test_ranks_add_time():
    dense = [dense_seconds(10_000_000, workers, LINK) for workers in WORLDS]
    assert dense == sorted(dense) and len(set(dense)) == len(dense)
    gathers = [
        compressed_seconds("all_gather", (n - 1) * 1000, [("gather", 1000)], n, LINK, Work(0.1, 0.01)) for n in WORLDS
    ]
    assert gathers == sorted(gathers) and len(set(gathers)) == len(gathers)


def test_a_rank_alone_exchanges_nothing():
    assert dense_seconds(1000, 1, LINK) == 0
    assert compressed_seconds("all_gather", 0, [("gather", 1000)], 1, LINK, Work(1.0, 1.0)) == 0


def test_backward_hides_waiting_and_not_work():
    assert exposed(1.0, backward=0.0) == 1.0
    assert exposed(0.5, backward=1.0) == 0.0
    assert exposed(1.0, backward=1.0) == pytest.approx(1 - cost.HIDES)
    assert exposed(1.0, backward=1.0, busy=1.0) == 1.0
    assert exposed(1.0, backward=1.0, busy=0.2) == pytest.approx(0.2 + 0.8 - cost.HIDES)
    assert exposed(0.5, backward=1.0, busy=0.2) == pytest.approx(0.1)


def test_on_another_wire_the_processor_works_as_long_for_a_byte():
    measured = Link(1e-3, 1e8, gathers=0.8, busy=0.25)
    assert measured.at(1e8) == measured
    assert measured.at(2e8) == Link(1e-3, 2e8, gathers=0.8, busy=0.5)
    assert measured.at(1e12) == Link(1e-3, 4e8, gathers=0.8, busy=1.0)
    assert LINK.at(1e12) == Link(1e-3, 1e12)


@pytest.mark.parametrize("workers", WORLDS)
def test_bandwidth_to_hide_is_the_least_that_does(workers):
    size, backward = 44_700_000, 0.5
    enough = cost.bandwidth_to_hide(size, workers, 1e-3, backward)
    seconds = [dense_seconds(size, workers, Link(1e-3, share * enough)) for share in (1.001, 0.999)]
    assert exposed(seconds[0], backward) == 0 < exposed(seconds[1], backward)


def test_no_bandwidth_hides_what_waits_too_often():
    assert cost.bandwidth_to_hide(1000, 64, 1e-3, 0.1) == float("inf")


@pytest.mark.parametrize(
    "ramp",
    [
        Ramp((0.5, 0.75), 0.9, dense=1),
        Ramp((0.5,), 0.9, by="step"),
        Ramp((0.5, 0.75, 0.5), 0.9, by="coverage"),
        Ramp((), 0.9),
    ],
)
@pytest.mark.parametrize("epochs", [1, 2, 9])
def test_the_steps_of_a_run_are_counted_by_sparsity(ramp, epochs):
    each = Counter(ramp(step // 3, step) for step in range(3 * epochs))
    assert steps_at(ramp, epochs, 3) == each == steps_at(lambda epoch, step: ramp(epoch, step), epochs, 3)


def test_a_long_run_is_counted_at_once():
    assert steps_at(Ramp((0.5,), 0.9), 2**20, 2**30) == {0.5: 2**30, 0.9: (2**20 - 1) * 2**30}
