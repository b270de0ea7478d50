"""Whole trainings, from their curves to the CSV and its table."""

import pytest

from benchmarks import time_to_accuracy
from benchmarks.time_to_accuracy import record, whole_run


@pytest.fixture(autouse=True)
def recorded(monkeypatch, tmp_path):
    """Two links, two seeds."""
    monkeypatch.setattr(time_to_accuracy, "CSV", tmp_path / "time_to_accuracy.csv")
    runs = []
    for rate, seconds in ((1000, 40.0), (10_000, 20.0)):
        for method in ("dgc:strategy.topology=auto", "ddp") if rate == 1000 else ("ddp",):
            runs.append(whole_run(method, 0, rate, [(1.0, 0.5), (seconds, 0.96)], 4_000_000))
            runs.append(whole_run(method, 1, rate, [(1.0, 0.5), (seconds + 2, 0.98)], 6_000_000))
    record(runs, time_to_accuracy.CSV)
    return runs


def test_the_table_has_medians_and_means_of_the_seeds():
    *_, dgc, ddp = time_to_accuracy.table().splitlines()
    assert dgc == "| `dgc` | 41 s | — | 97.0 % | 2.5 MB |"
    assert ddp == "| DDP | 41 s | 21 s | 97.0 % | 2.5 MB |"


def test_a_run_that_is_recorded_again_has_one_line(recorded):
    before = time_to_accuracy.read_csv()
    record(recorded[:2], time_to_accuracy.CSV)
    assert time_to_accuracy.read_csv() == before and len(before) == 6
