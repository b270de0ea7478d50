"""The tables of runs: methods paired with dense by fold and seed."""

import pytest

from benchmarks import results, summaries
from benchmarks.summaries import composed


def run(correct, *, method="dgc", fold=None, seed=0, ranks=2, steps=10, dirichlet=None, machine="one", data="Digits"):
    return results.Result(
        data=data,
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
        machine=machine,
        dirichlet=dirichlet,
    )


def test_a_difference_is_that_of_pairs_and_has_student_s_interval():
    """Differences of 1, 2 and 6: mean 3, standard error sqrt(7 / 3), times 4.303 with 2 degrees of freedom."""
    dense = [run(80, fold=0), run(70, fold=1), run(60, fold=2)]
    lossy = [run(66, fold=2), run(81, fold=0), run(72, fold=1), run(99, fold=0, seed=1), run(99)]
    assert results.paired(lossy, dense) == "+3.00 ± 6.57 (3)"
    assert results.paired(dense, lossy) == "-3.00 ± 6.57 (3)"


def test_a_run_is_beside_the_dense_one_of_its_machine_if_there_is_one():
    dense = [run(80, fold=0), run(90, fold=0, machine="other"), run(70, fold=1), run(74, fold=1, machine="third")]
    lossy = [run(91, fold=0, machine="other"), run(73, fold=1, machine="other")]
    assert results.paired(lossy, dense) == "+1.00 ± 0.00 (2)"


def test_a_fold_that_was_run_on_two_machines_is_one_pair():
    dense = [run(80, fold=0), run(90, fold=0, machine="other"), run(70, fold=1)]
    lossy = [run(81, fold=0), run(93, fold=0, machine="other"), run(72, fold=1)]
    assert results.paired(lossy, dense) == "+2.00 ± 0.00 (2)"


@pytest.mark.parametrize(
    ("device", "machine"),
    [("CPU", "2 cores of AMD EPYC, torch 2.14.1"), ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3, torch 2.14.1")],
)
def test_a_machine_is_that_of_the_arithmetic(device, machine):
    cost = {"world_size": 8, "bytes_sent": 1, "dense_bytes": 10, "last_step": {"ratio": 10.0}, "steps": 220}
    summary = {"communication": cost, "config": composed("recipe=digits"), "val_correct": 9, "val_images": 10}
    summary |= {"device": device, "cpu_cores": 2, "processor": "AMD EPYC", "packages": {"torch": "2.14.1"}}
    assert results.result(summary).machine == machine


@pytest.mark.parametrize("common", [0, 1])
def test_without_two_pairs_there_is_no_difference(common):
    assert results.paired([run(80, seed=seed) for seed in range(3)], [run(70, seed=s) for s in range(common)]) == "—"


def test_a_cross_validation_pairs_runs_of_equal_ranks_and_steps():
    dense = [run(80 + fold, method="none", fold=fold, ranks=ranks) for ranks in (2, 8) for fold in (0, 1)]
    dense += [run(70 + fold, method="none", fold=fold, ranks=8, steps=20) for fold in (0, 1)]
    lossy = [run(79 + fold, fold=fold, ranks=8) for fold in (0, 1)]
    table = results.folds([*dense, *lossy, run(10)])
    *_, dense_of_two, longer, dense_of_eight, last = [line.split(" | ") for line in table.splitlines()]
    assert [cells[1:4] for cells in (dense_of_two, dense_of_eight)] == [["`none`", "80.50 ± 0.71 (2)", ""]] * 2
    assert longer[0].endswith("N=8, 20 steps") and longer[2] == "70.50 ± 0.71 (2)"
    assert last[0].endswith("N=8, 10 steps") and last[1:4] == ["`dgc`", "79.50 ± 0.71 (2)", "-1.00 ± 0.00 (2)"]


def test_runs_with_images_of_their_own_are_not_beside_others():
    dense = [run(80 + fold, method="none", fold=fold) for fold in (0, 1)]
    unequal = [run(60 + fold, method="none", fold=fold, dirichlet=0.3) for fold in (0, 1)]
    lossy = [run(59 + fold, fold=fold, dirichlet=0.3) for fold in (0, 1)]
    table = results.folds([*lossy, *unequal, *dense])
    *_, equal, first, last = [line.split(" | ") for line in table.splitlines()]
    assert equal[2] == "80.50 ± 0.71 (2)" and first[2] == "60.50 ± 0.71 (2)"
    assert last[0].endswith("N=2, 10 steps, Dirichlet 0.3") and last[3] == "-1.00 ± 0.00 (2)"


@pytest.mark.parametrize(
    "overrides, method",
    [
        ("recipe=digits", "dgc"),
        ("recipe=digits_resnet50 compressor=twobit data.fold=1 trainer.devices=8", "twobit"),
        ("recipe=digits_swin compressor=dgc_int8", "dgc dense_values=int8"),
        ("recipe=digits compressor=twobit compressor.warmup_epochs=3", "twobit warmup_epochs=3"),
        ("recipe=digits_resnet50 optimizer.lr=0.005", "dgc optimizer.lr=0.005"),
        (
            "recipe=digits callbacks=[default,sparsity_warmup] callbacks.sparsity_warmup.schedule=linear",
            "dgc sparsity_warmup.schedule=linear sparsity_warmup.periods=4 sparsity_warmup.by=epoch "
            "sparsity_warmup.dense=0",
        ),
        ("recipe=digits_dga", "dga K=8 D=8"),
        ("recipe=digits strategy=dga compressor=onebit strategy.period=15 strategy.delay=0", "dga:onebit K=15 D=0"),
        ("recipe=digits_sparseloco", "sparseloco K=8 D=0"),
        ("recipe=digits_sparseloco compressor.values=fp32", "sparseloco K=8 D=0 values=fp32"),
        ("recipe=swin_fashion_mnist", "eden"),
        ("recipe=stdlib_gpt trainer.max_epochs=50 compressor.bits=2", "eden bits=2"),
        ("recipe=stdlib_gpt_muon compressor=none", "none"),  # the optimizer is a column of its own
        ("recipe=stdlib_gpt compressor=none optimizer=muon", "none optimizer.lr=0.008"),
        ("recipe=stdlib_gpt_sparseloco strategy.period=8", "sparseloco K=8 D=0"),
        ("recipe=stdlib_gpt_muloco", "muloco K=30 D=0"),
    ],
)
def test_a_method_is_its_name_its_rounds_and_what_is_not_the_recipe_s(overrides, method):
    assert summaries.method(composed(*overrides.split())) == method


def test_a_table_has_methods_in_their_order_and_longer_rounds_later():
    names = ["none", "dgc", "dga K=8 D=8", "dga K=15 D=0", "dga:onebit K=8 D=8", "sparseloco K=8 D=0"]
    assert sorted({*names}, key=summaries.place) == names


def test_the_page_s_table_has_dense_runs_of_the_same_pairs(monkeypatch):
    """Another processor's dense runs, of which the method has none, are in neither column."""
    setting = {"steps": 660, "ranks": 8}
    dense = [run(80 + fold, method="none", fold=fold, **setting) for fold in (0, 1)]
    other = [run(10, method="none", fold=fold, machine="other", **setting) for fold in (0, 1)]
    lossy = [run(79 + fold, method="dgc dense_values=int8", fold=fold, **setting) for fold in (0, 1)]
    monkeypatch.setattr(results, "read_csv", lambda: [*dense, *other, *lossy])
    row = next(line for line in results.accuracy().splitlines() if "`dgc` dense_values" in line)
    assert row == "| `dgc` dense_values=int8 |  | -1.0 ± 0.0 | 10x | small Swin, AdamW | 80.5 |"


def test_fashion_mnist_has_a_table_of_its_own_with_whatever_seeds_exist(monkeypatch):
    digits = [run(10, method="none"), run(20)]
    dense = [run(correct, method="none", seed=seed, data="FashionMNIST") for seed, correct in enumerate((90, 92))]
    lossy = [run(89, data="FashionMNIST"), run(92, data="FashionMNIST", seed=1)]
    single = [run(88, method="powersgd", data="FashionMNIST")]
    monkeypatch.setattr(results, "read_csv", lambda: [*digits, *dense, *lossy, *single])
    assert results.fashion().splitlines()[2:] == [
        "| `dgc` | -0.50 ± 6.35 | 10x | small Swin, AdamW | 2 |",
        "| `powersgd` | -2.00 | 10x | small Swin, AdamW | 1 |",
    ]
