"""Period and delay: what delay="auto" chooses from measured times."""

import pytest

from lightning_gradcomp.local_sgd.rounds import RoundReport
from lightning_gradcomp.local_sgd.schedule import RoundSchedule
from tests.averaging.workers import all_equal, weights
from tests.local_sgd.simulation import simulated_exchanges
from tests.local_sgd.training import run_ranks, set_up, train


@pytest.mark.parametrize(("exchange_seconds", "chosen"), [(6.0, (8, 8)), (0.5, (2, 1))])
def test_auto_hides_the_exchange_that_it_has_measured(exchange_seconds, chosen):
    """Steps take 1 s on rank 0 and 1.5 s on rank 1; the margin is 1.2."""

    def work(rank, group):
        model, optimizer, averager = set_up(group, period=2, delay="auto")
        schedules, stalls = [], []
        for step in range(30):
            clock.advance([1.0, 1.5][rank])
            train(model, optimizer, averager, rank, range(step, step + 1))
            schedules.append((averager.period, averager.delay))
            stalls.append(averager.spent.stall_seconds)
        late_rounds = averager.spent.late_rounds
        averager.drain()
        return weights(model), schedules, stalls, late_rounds

    with simulated_exchanges(lambda n: exchange_seconds) as clock:
        results = run_ranks(2, work)
    assert all_equal([drained for drained, *_ in results])
    for _, schedules, stalls, late_rounds in results:
        assert schedules == [(2, 0)] * 5 + [chosen] * 25  # three rounds of two steps are measured
        assert stalls[5:] == [3 * exchange_seconds] * 25  # only the measured rounds wait
        assert late_rounds == 0


def report(step, exchange):
    return RoundReport(1, step_seconds=step, exchange_seconds=exchange)


def test_auto_takes_the_fastest_step_and_slowest_exchange():
    schedule = RoundSchedule(4, "auto")
    for _ in range(3):
        assert schedule.measuring and (schedule.period, schedule.delay) == (4, 0)
        schedule.round_applied([report(0.02, 0.1), report(0.01, 0.05)])
    assert not schedule.measuring and (schedule.period, schedule.delay) == (12, 12)  # 1.2 * 0.1 s in steps of 0.01 s


def test_auto_chooses_again_after_a_drain_only():
    schedule = RoundSchedule(4, "auto")
    for _ in range(3):
        schedule.round_applied([report(0.01, 0.1)])
    schedule.round_applied([report(0.1, 0.01), report(0.1, 0.02)])
    assert (schedule.period, schedule.delay) == (12, 12)
    schedule.set_delay()  # as a drain does
    assert (schedule.period, schedule.delay) == (4, 1)


def test_auto_chooses_at_most_64_steps():
    schedule = RoundSchedule(4, "auto")
    for _ in range(3):
        schedule.round_applied([report(0.001, 9.0)])
    assert (schedule.period, schedule.delay) == (64, 64)


def test_the_state_has_what_auto_has_chosen():
    schedule = RoundSchedule(4, "auto")
    for _ in range(3):
        schedule.round_applied([report(0.01, 0.1)])
    resumed = RoundSchedule(4, "auto")
    resumed.load_state_dict(schedule.state_dict())
    assert not resumed.measuring and (resumed.period, resumed.delay) == (12, 12)
    fixed = RoundSchedule(8, 3)
    fixed.load_state_dict(schedule.state_dict())
    assert (fixed.period, fixed.delay) == (8, 3)


def test_measuring_continues_after_a_resume():
    schedule = RoundSchedule(4, "auto")
    schedule.round_applied([report(0.01, 0.1)])
    resumed = RoundSchedule(4, "auto")
    resumed.load_state_dict(schedule.state_dict())
    for _ in range(2):
        assert resumed.measuring
        resumed.round_applied([report(0.01, 0.1)])
    assert not resumed.measuring and resumed.delay == 12
