"""Runs of language models, from their files to the CSVs, the table and the curves."""

import json

import pytest

from benchmarks import language_models
from benchmarks.language_models import Result, curve, record, table
from benchmarks.summaries import composed, found

METRICS = """comm/total_bytes_sent,epoch,step,train_loss,val_loss
500,0,9,5.0,
1000,0,9,,{first}
2000,1,19,,{last}
"""


@pytest.fixture(autouse=True)
def csvs(monkeypatch, tmp_path):
    monkeypatch.setattr(language_models, "CSV", tmp_path / "text.csv")
    monkeypatch.setattr(language_models, "CURVES", tmp_path / "text_curves.csv")


def finished(folder, *, words="recipe=stdlib_gpt", seed=0, loss=2.0):
    """A run of two epochs of ten steps, as `gradcomp` leaves it."""
    cost = {"world_size": 2, "steps": 20, "bytes_sent": 2000, "dense_bytes": 8000}
    summary = {"val_loss": loss, "config": composed(*words.split(), f"seed={seed}"), "communication": cost}
    summary |= {"device": "CPU", "cpu_cores": 2, "processor": "AMD EPYC", "packages": {"torch": "2.14.1"}}
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.csv").write_text(METRICS.format(first=loss + 1, last=loss))


def result(loss, *, method="dgc", optimizer="AdamW", ranks=2, seed=0, steps=600):
    cost = {"bytes_sent": 10, "dense_bytes": 100}
    run = {"method": method, "optimizer": optimizer, "ranks": ranks, "seed": seed, "steps": steps}
    return Result(**run, **cost, val_loss=loss, machine="one")


def test_curves_are_means_over_seeds(tmp_path):
    finished(tmp_path / "runs" / "0", loss=2.0)
    finished(tmp_path / "runs" / "1", loss=2.5, seed=1)
    for _ in range(2):
        record(found(tmp_path / "runs"))
    assert curve("eden", "AdamW", 20) == [(1000, 3.25), (2000, 2.25)]
    assert curve("eden", "Muon", 20) == []
    assert [each.val_loss for each in language_models.read_csv()] == [2.0, 2.5]


def test_a_method_is_paired_with_dense_runs_of_its_optimizer_steps_and_seed(monkeypatch):
    dense = [result(2.0, method="none"), result(2.1, method="none", seed=1), result(1.5, method="none", steps=5000)]
    dense += [result(1.0, method="none", optimizer="Muon")]
    lossy = [result(2.01), result(2.13, seed=1), result(9.0, seed=2), result(1.6, steps=5000)]
    lossy += [result(1.02, method="muloco K=30 D=0", optimizer="Muon")]
    monkeypatch.setattr(language_models, "read_csv", lambda: [*lossy, *dense])
    assert table().splitlines()[2:] == [
        "| `dgc` | +0.020 ± 0.127 |  | 10x |",
        "| `muloco` K=30 D=0 (Muon) | +0.020 |  | 10x |",
    ]


def test_differences_by_length_are_means_over_seeds(monkeypatch):
    dense = [result(2.0, method="none"), result(2.1, method="none", seed=1), result(1.5, method="none", steps=5000)]
    lossy = [result(2.2), result(2.2, seed=1), result(1.6, steps=5000), result(9.0, ranks=8)]
    monkeypatch.setattr(language_models, "read_csv", lambda: [*lossy, *dense])
    assert language_models.by_length("dgc", 2) == {600: pytest.approx(0.15), 5000: pytest.approx(0.1)}


def test_a_run_is_paired_with_a_dense_one_of_as_many_ranks(monkeypatch):
    dense = [result(2.0, method="none"), result(2.1, method="none", seed=1), result(2.5, method="none", ranks=8)]
    lossy = [result(2.6, ranks=8), result(2.2, ranks=8, seed=1)]
    monkeypatch.setattr(language_models, "read_csv", lambda: [*lossy, *dense])
    *_, row = table().splitlines()
    assert row == "| `dgc` |  | +0.100 | 10x |"


def test_a_method_without_a_dense_run_has_its_bytes_alone(monkeypatch):
    monkeypatch.setattr(language_models, "read_csv", lambda: [result(2.0), result(2.2, seed=1)])
    *_, row = table().splitlines()
    assert row == "| `dgc` | — |  | 10x |"
