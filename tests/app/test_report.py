"""`gradcomp report` on folders that the tests write themselves, in the real format, with made-up numbers."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from lightning_gradcomp.app import report
from lightning_gradcomp.app.report.figures import draw
from lightning_gradcomp.app.report.groups import grouped
from lightning_gradcomp.app.report.page import page
from lightning_gradcomp.app.report.runs import RESIDUAL, SENT, SPARSITY, TIME, VALIDATED, find

DENSE = 1000
"""Bytes that a dense step of the made-up network sends."""


def config(compressor="dgc", *, seed=0, strategy="ddp", ckpt=None, trainer=(), **options):
    """What config.yaml holds, as far as a report looks at it."""
    return {
        "seed": seed,
        "topology": "all_gather",
        "inside": None,
        "ckpt": ckpt,
        "model": {"name": "resnet18"},
        "data": {"name": "digits", "batch_size": 64},
        "compressor": {"name": compressor, **options},
        "strategy": {"name": strategy},
        "optimizer": {"name": "sgd", "lr": 0.02},
        "trainer": {"max_epochs": 2, "devices": "auto", "log_every_n_steps": 1, **dict(trainer)},
        "logger": {"name": "csv"},
    }


def write_run(
    folder: Path, accuracies=(0.5, 0.9), *, world=2, sent=10, first=0, spent=0, residual=True, ended=True, **options
):
    """A run of two steps an epoch, of which the first is dense, with a validation after each epoch."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config(**options)))
    rows, total = [], spent
    for epoch, accuracy in enumerate(accuracies):
        for step in (first + 2 * epoch, first + 2 * epoch + 1):
            now = sent if step else DENSE
            total += now
            row = {"step": step, SENT: total, TIME: 10.0 * (step + 1), "comm/bytes_sent": now}
            row |= {f"comm/ratio_N{world}": DENSE / now, SPARSITY: 1 - now / DENSE}
            row |= {f"time/{phase}_ms": 5.0 * (step + 1) for phase in ("compute", "compress", "exchange", "decompress")}
            rows.append(row | ({RESIDUAL: 2.0 + step} if residual and step else {}))
        rows.append({"step": step, SENT: total, TIME: 10.0 * (step + 1) + 1, VALIDATED: accuracy})
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted({name for row in rows for name in row}))
        writer.writeheader()
        writer.writerows(rows)
    if ended:
        ratios = {"totals": {"ratio": 2 * len(accuracies) * DENSE / total}, "last_step": {"ratio": DENSE / sent}}
        medians = {"compute": 40.0, "compress": 3.0, "exchange": 2.0, "decompress": 1.5}
        communication = {"topology": "all_gather", **ratios, "milliseconds": medians}
        machine = {
            "device": "CPU",
            "devices_per_node": world,
            "gpus_per_node": 0,
            "nodes": 1,
            "cpu_cores": 2,
            "processor": "AMD EPYC",
            "threads_per_process": 1,
        }
        versions = {"python": "3.11.7", "packages": {"torch": "2.15.0", "lightning": None}}
        (folder / "summary.json").write_text(json.dumps({"communication": communication, **machine, **versions}))
    return folder


def page_of(*folders):
    """The page alone, which takes a tenth of the time of its files."""
    runs, left_out = find(list(folders))
    groups = grouped(runs)
    return page(groups, draw(groups), left_out)


def labels(folder):
    return [group.label for group in grouped(find([folder])[0])]


def row_of(text, label):
    """The table's row of a group: column -> cell."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    [cells] = [line for line in lines if line[0] == label]
    return dict(zip(lines[0], cells, strict=True))


def test_seeds_are_one_line_with_a_band(tmp_path):
    write_run(tmp_path / "0", (0.5, 0.8), seed=0)
    write_run(tmp_path / "1", (0.7, 0.9), seed=1)
    write_run(tmp_path / "2", compressor="none")
    dgc, none = grouped(find([tmp_path])[0])
    curve = dgc.curve(SENT, VALIDATED)
    assert np.allclose(curve.x, [1010, 1030])
    assert np.allclose(curve.y, [0.6, 0.85]) and np.allclose(curve.low, [0.5, 0.8])
    assert np.allclose(curve.high, [0.7, 0.9])
    assert (len(dgc.runs), len(none.runs)) == (2, 1)


def test_a_band_has_the_steps_that_all_runs_have(tmp_path):
    write_run(tmp_path / "0", (0.5, 0.8), seed=0)
    write_run(tmp_path / "1", (0.7, 0.9, 0.95), seed=1)
    [group] = grouped(find([tmp_path])[0])
    assert np.allclose(group.curve(TIME, VALIDATED).y, [0.6, 0.85])


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([{"seed": 0}, {"seed": 3}], ["dgc"]),
        ([{"trainer": {"enable_progress_bar": True}}, {}], ["dgc"]),
        ([{"sparsity": 0.99}, {"sparsity": 0.999}, {"compressor": "none"}],
         ["dgc sparsity=0.99", "dgc sparsity=0.999", "none"]),
        ([{"world": 2}, {"world": 4, "trainer": {"devices": 4}}], ["dgc N=2", "dgc N=4"]),
        ([{"compressor": "none"}, {"compressor": "none", "strategy": "dga"}], ["none", "dga none"]),
        ([{"ended": False}, {"seed": 1}], ["dgc seed=0 (not finished)", "dgc"]),
    ],
)  # fmt: skip
def test_labels_say_in_what_groups_differ(tmp_path, runs, expected):
    for number, options in enumerate(runs):
        write_run(tmp_path / str(number), **options)
    assert labels(tmp_path) == expected


def test_the_page_and_its_table(tmp_path):
    for seed, accuracies in enumerate([(0.5, 0.8), (0.95, 0.9)]):
        write_run(tmp_path / str(seed), accuracies, seed=seed)
    write_run(tmp_path / "2", compressor="terngrad", sent=50, residual=False)
    text = page_of(tmp_path)
    row = row_of(text, "dgc")
    assert (row["runs (seeds)"], row["N"], row["best"]) == ("2 (0, 1)", "2", "95.00 %")
    assert row["validation accuracy"] == "85.00 ± 7.07 %"
    assert (row["bytes sent by a rank"], row["time"]) == ("1.03 kB", "41 s")
    assert (row["ratio, whole run"], row["ratio, last step"]) == ("3.88 (N=2)", "100 (N=2)")
    assert row["ms a step"] == "46.5 = 40 + 3 + 2 + 1.5"
    assert row_of(text, "terngrad")["validation accuracy"] == "90.00 %"
    assert "Residual, relative to the gradient, terngrad: has no residual." in text
    assert "CPU, 2 cores of AMD EPYC, 1 node with 2 processes of 1 thread\n" in text
    assert "Python 3.11.7, torch 2.15.0" in text
    assert "dgc (n = 2)" in text


def test_the_page_says_that_ranks_share_a_gpu(tmp_path):
    file = write_run(tmp_path / "0") / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"device": "NVIDIA H100", "gpus_per_node": 1}))
    assert "1 node with 2 processes of 1 thread, which share 1 GPU\n" in page_of(tmp_path)


def test_the_files_of_twelve_groups(tmp_path):
    for number in range(12):
        write_run(tmp_path / "runs" / str(number), sparsity=number / 100, sent=10 + number)
    path = report.write([tmp_path / "runs"], tmp_path / "out")
    text, folder = path.read_text(), tmp_path / "out" / "figures"
    names = ("accuracy_over_bytes", "accuracy_over_time", "step_time", "ratio_and_density", "residual")
    assert {file.name for file in folder.iterdir()} == {f"{name}.{form}" for name in names for form in ("png", "svg")}
    assert all(f"(figures/{name}.png)" in text for name in names)
    svg = {name: (folder / f"{name}.svg").read_text() for name in names}
    assert all(f"dgc sparsity={number / 100}" in each for each in svg.values() for number in range(12))
    assert "gradient bytes sent by one rank" in svg["accuracy_over_bytes"]
    assert "wall time since the fit began (s)" in svg["accuracy_over_time"]
    assert "(N=2)" in svg["ratio_and_density"] and "decompress" in svg["step_time"]


def test_a_run_that_goes_on_has_the_rows_before_its_first_step(tmp_path):
    first = write_run(tmp_path / "a", (0.3, 0.4, 0.99), ended=False)
    checkpoint = str(first / "checkpoints" / "last.ckpt")
    second = write_run(tmp_path / "b", (0.6, 0.7), first=4, spent=1030, ckpt=checkpoint, ended=False)
    third = write_run(tmp_path / "c", (0.8,), first=8, spent=1070, ckpt=str(second / "checkpoints" / "last.ckpt"))
    [run], left_out = find([tmp_path])  # the runs that it goes on from are in it, and not beside it
    assert run.folder == third.resolve() and left_out == {}
    steps, accuracies = run.at("step", VALIDATED)
    assert np.allclose(steps, [1, 3, 5, 7, 9]) and np.allclose(accuracies, [0.3, 0.4, 0.6, 0.7, 0.8])
    assert np.all(np.diff(run.at(SENT)[0]) >= 0)


def test_an_earlier_run_that_is_gone_is_told(tmp_path):
    write_run(tmp_path / "b", first=4, ckpt=str(tmp_path / "gone" / "checkpoints" / "last.ckpt"))
    text = page_of(tmp_path / "b")
    assert "resumes" in text and "gone`, which does not exist any more" in text


def test_an_interrupted_run_is_shown_as_that(tmp_path):
    text = page_of(write_run(tmp_path / "0", ended=False, world=4))
    row = row_of(text, "dgc seed=0 (not finished)")
    assert (row["ratio, whole run"], row["ratio, last step"]) == ("3.88 (N=4)", "100 (N=4)")
    assert row["ms a step"] == "50 = 12.5 + 12.5 + 12.5 + 12.5"  # of the rows that there are
    assert "is not finished: without summary.json" in text


def test_one_process_sends_nothing(tmp_path):
    text = page_of(write_run(tmp_path / "0", world=1))
    assert "bytes sent, dgc: sends nothing: N=1." in text
    assert "figures/accuracy_over_bytes.png" not in text


def test_where_the_report_goes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "draw", lambda groups: [])
    write_run(tmp_path / "sweep" / "0")
    write_run(tmp_path / "sweep" / "1", seed=1)
    assert report.main(["sweep/0"]) == 0 and report.main(["sweep"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "sweep" / "0" / "report.md"), "report/report.md"]
    assert (tmp_path / "report" / "report.md").exists()


def test_what_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "begun", (), ended=False)
    for words, sentence in {
        (): "RUN: got 'nothing', allowed: RUN",
        ("--fast",): "argument: got '--fast', allowed: RUN",
        (str(tmp_path / "gone"),): "RUN: got '.*gone', allowed: a folder that exists",
        (str(tmp_path / "empty"),): "RUN: got '.*empty', allowed: a folder with config.yaml and metrics.csv",
        (str(tmp_path / "begun"),): "RUN: got '.*begun', allowed: a run that has completed its first validation",
    }.items():
        with pytest.raises(ValueError, match=sentence):
            report.main(list(words))


def test_a_run_without_validation_among_others_is_left_out(tmp_path):
    write_run(tmp_path / "0")
    write_run(tmp_path / "1", (), seed=1, ended=False)
    assert "1` is left out: it has no validation yet." in page_of(tmp_path)


def break_run(folder, how):
    """Damage one of the files of a run, or its reference to another."""
    values = yaml.safe_load((folder / "config.yaml").read_text())
    contents = {
        "metrics": ("metrics.csv", "step,val_acc\n1,high\n"),
        "columns": ("metrics.csv", "epoch,val_acc\n1,0.5\n"),
        "summary": ("summary.json", '{"communication": {'),
        "entries": ("summary.json", "[]"),
        "config": ("config.yaml", "seed: [1\n"),
        "empty": ("config.yaml", ""),
        "itself": ("config.yaml", yaml.safe_dump({**values, "ckpt": str(folder.parent / "b" / "checkpoints" / "x")})),
    }
    name, text = contents[how]
    (folder / name).write_text(text)
    return name


@pytest.mark.parametrize("how", ["metrics", "columns", "summary", "entries", "config", "empty", "itself"])
def test_a_broken_run_is_named_and_left_out(tmp_path, how):
    write_run(tmp_path / "good", seed=5)
    broken = write_run(tmp_path / "a")
    if how == "itself":  # two runs that name each other
        write_run(tmp_path / "b", ckpt=str(broken / "checkpoints" / "last.ckpt"))
    name = break_run(broken, how)
    runs, left_out = find([tmp_path])
    assert [run.folder.name for run in runs] == ["good"]
    assert set(left_out) == ({broken, tmp_path / "b"} if how == "itself" else {broken})
    assert left_out[broken].startswith(str((tmp_path / "b" if how == "itself" else broken) / name))
    assert f"`{broken}` is left out: {broken.parent}" in page_of(tmp_path)
    with pytest.raises(ValueError, match=f"{name}"):
        find([broken])


def test_names_from_a_config_are_escaped(tmp_path):
    write_run(tmp_path / "0", compressor="evil|x\n<script>$a_{", seed="[a](b)")
    write_run(tmp_path / "1", compressor="_none")
    text = report.write([tmp_path], tmp_path / "out").read_text()
    assert "| evil\\|x &lt;script&gt;$a_{ | 1 (\\[a\\](b)) |" in text and "<script>" not in text
    svg = (tmp_path / "out" / "figures" / "step_time.svg").read_text()
    assert "$a_{" in svg


def test_secrets_of_a_logger_are_not_in_a_report(tmp_path):
    for seed, password in enumerate(("hunter1", "hunter2")):
        folder = write_run(tmp_path / str(seed), seed=seed)
        values = yaml.safe_load((folder / "config.yaml").read_text())
        values["logger"] = {"name": "mlflow", "tracking_uri": f"https://user:{password}@host"}
        values["data"]["dir"] = f"https://user:{password}@host"
        (folder / "config.yaml").write_text(yaml.safe_dump(values))
    text = page_of(tmp_path)
    assert "hunter" not in text and "user" not in text


def test_a_report_that_cannot_be_written_is_refused(tmp_path):
    write_run(tmp_path / "0")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^--out: got '.*file', allowed: a folder that can be written: .*file"):
        report.write([tmp_path / "0"], tmp_path / "file")
