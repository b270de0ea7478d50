"""Whole trainings, from a benchmark's JSON to the CSV and its table."""

import json

import pytest

from benchmarks import whole_runs


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """Two links, two seeds."""
    monkeypatch.setattr(whole_runs, "CSV", tmp_path / "time_to_accuracy.csv")
    for rate, seconds in ((1000, 40.0), (10_000, 20.0)):
        curves = [[[1.0, 0.5], [seconds, 0.96]], [[1.0, 0.5], [seconds + 2, 0.98]]]
        methods = ("dgc:topology=auto", "ddp") if rate == 1000 else ("ddp",)
        found = {method: {"curves": curves, "sent": [4_000_000, 6_000_000]} for method in methods}
        path = tmp_path / f"{rate}.json"
        conditions = {"rate_mbit": f"{rate}.0", "seeds": "0,1"}
        path.write_text(json.dumps({"machine": "one", "conditions": conditions, "results": found}))
        whole_runs.record(whole_runs.runs_of(path))
    return path


def test_the_table_has_medians_and_means_of_the_seeds(recorded):
    *_, dgc, ddp = whole_runs.table().splitlines()
    assert dgc == "| `dgc` | 41 s | — | 97.0 % | 2.5 MB |"
    assert ddp == "| DDP | 41 s | 21 s | 97.0 % | 2.5 MB |"


def test_a_run_that_is_recorded_again_has_one_line(recorded):
    before = whole_runs.read_csv()
    whole_runs.record(whole_runs.runs_of(recorded))
    assert whole_runs.read_csv() == before and len(before) == 6
