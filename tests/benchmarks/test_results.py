"""The tables of runs: methods paired with dense by fold and seed."""

import json

import pytest

from benchmarks import results


def run(correct, *, method="dgc", fold=None, seed=0, ranks=2, steps=10):
    return results.Result(
        model="swin_mini",
        method=method,
        ranks=ranks,
        fold=fold,
        seed=seed,
        correct=correct,
        images=100,
        bytes_sent=1,
        dense_bytes=10,
        last_ratio=10.0,
        steps=steps,
        machine="one",
    )


def test_a_difference_is_that_of_pairs_and_has_student_s_interval():
    """Differences of 1, 2 and 6: mean 3, standard error sqrt(7 / 3), times 4.303 with 2 degrees of freedom."""
    dense = [run(80, fold=0), run(70, fold=1), run(60, fold=2)]
    lossy = [run(66, fold=2), run(81, fold=0), run(72, fold=1), run(99, fold=0, seed=1), run(99)]
    assert results.paired(lossy, dense) == "+3.00 ± 6.57 (3)"
    assert results.paired(dense, lossy) == "-3.00 ± 6.57 (3)"


def test_more_pairs_than_the_table_has_take_its_last_quantile():
    """One of 40 pairs differs by 40 points more than the others, so the standard error is 1."""
    dense = [run(0, seed=seed) for seed in range(40)]
    lossy = [run(90 if seed == 0 else 50, seed=seed) for seed in range(40)]
    assert results.paired(lossy, dense) == "+51.00 ± 2.04 (40)"


@pytest.mark.parametrize("common", [0, 1])
def test_without_two_pairs_there_is_no_difference(common):
    assert results.paired([run(80, seed=seed) for seed in range(3)], [run(70, seed=s) for s in range(common)]) == "—"


def test_a_cross_validation_pairs_runs_of_equal_ranks_and_steps():
    dense = [run(80 + fold, method="none", fold=fold, ranks=ranks) for ranks in (2, 8) for fold in (0, 1)]
    dense += [run(70 + fold, method="none", fold=fold, ranks=8, steps=20) for fold in (0, 1)]
    lossy = [run(79 + fold, fold=fold, ranks=8) for fold in (0, 1)]
    [table] = results.folds([*dense, *lossy, run(10)])
    *_, dense_of_two, longer, dense_of_eight, last = [line.split(" | ") for line in table.splitlines()]
    assert [cells[1:4] for cells in (dense_of_two, dense_of_eight)] == [["`none`", "80.50 ± 0.71 (2)", ""]] * 2
    assert longer[0].endswith("N=8, 20 steps") and longer[2] == "70.50 ± 0.71 (2)"
    assert last[0].endswith("N=8, 10 steps") and last[1:4] == ["`dgc`", "79.50 ± 0.71 (2)", "-1.00 ± 0.00 (2)"]
    assert results.folds([run(10), run(11, method="none")]) == []


def test_runs_of_federated_data_are_left_out(tmp_path):
    for name, data in {"cifar10": {}, "plain": {"dirichlet": None}, "unequal": {"dirichlet": 0.3}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps({"config": {"data": data}, "name": name}))
    assert [summary["name"] for summary in results.summaries(tmp_path)] == ["cifar10", "plain"]
