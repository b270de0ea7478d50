"""`gradcomp report` on folders that the tests write themselves, in the real format, with made-up numbers."""

import json

import numpy as np
import pandas as pd
import pytest
import yaml

from lightning_gradcomp.app import report
from lightning_gradcomp.app.report import MEGABYTES, find, grouped


def write_run(
    folder, accuracies=(0.5, 0.9), *, compressor="DGC", strategy="CompressedDDPStrategy", world=2,
    ended=True, seed=0, optimizer="SGD", lr=0.02, devices="auto", **options,
):  # fmt: skip
    """A run of two steps an epoch that send 1 MB each, with a validation after each epoch."""
    folder.mkdir(parents=True)
    config = {
        "seed": seed,
        "folder": str(folder),
        "model": {"_target_": "lightning_gradcomp.app.models.resnet18"},
        "data": {"_target_": "lightning_gradcomp.app.data.Digits", "seed": "${seed}"},
        "compressor": {"_target_": f"lightning_gradcomp.{compressor}", **options},
        "strategy": {"_target_": f"lightning_gradcomp.{strategy}", "compressor": "${compressor}"},
        "optimizer": {"_target_": f"torch.optim.{optimizer}", "lr": lr, "betas": [0.9, 0.999]},
        "trainer": {"_target_": "lightning.Trainer", "devices": devices},
        "logger": {"csv": {"_target_": "lightning.pytorch.loggers.CSVLogger", "name": str(seed)}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    rows = []
    for step in range(2 * len(accuracies)):
        so_far = {"step": step, "comm/total_bytes_sent": 1e6 * (step + 1), "time/total_s": step + 1.0}
        rows.append({**so_far, "train_loss": 1 / (step + 1)})
        if step % 2:
            rows.append({**so_far, "val_acc": accuracies[step // 2]})
    pd.DataFrame(rows).to_csv(folder / "metrics.csv", index=False)
    if ended:
        cost = {
            "world_size": world,
            "topology": "all_gather",
            "milliseconds": {"compute": 40.0, "exchange": 2.5 + seed},
        }
        cost["totals"] = {"bytes_sent": 2e6 * len(accuracies), "ratio": 123.4}
        machine = {"device": "CPU", "processor": "AMD EPYC", "cpu_cores": 2, "nodes": 1, "devices_per_node": world}
        summary = {"val_acc": accuracies[-1], "epochs": len(accuracies), "communication": cost, **machine}
        (folder / "summary.json").write_text(json.dumps({**summary, "packages": {"torch": "2.15.0"}}))
    return folder


def row_of(text, method):
    """The table's row of a method: column -> cell."""
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    [cells] = [line for line in lines if line[0] == method]
    return dict(zip(lines[0], cells, strict=True))


def test_the_page_of_a_sweep(tmp_path):
    write_run(tmp_path / "sweep" / "0", (0.5, 0.8))
    write_run(tmp_path / "sweep" / "1", (0.7, 0.9), seed=1)
    write_run(tmp_path / "sweep" / "2", compressor="NoCompression")
    text = report.write([tmp_path / "sweep"], tmp_path / "out").read_text()
    assert text.startswith("# resnet18 on Digits: 2 configurations")
    row = row_of(text, "DGC")
    assert (row["runs (seeds)"], row["N"], row["topology"]) == ("2 (0, 1)", "2", "all_gather")
    assert row["accuracy, %"] == "85.00 ± 7.07"
    assert (row["sent by a rank"], row["ratio"], row["ms a step"]) == ("4 MB", "123", "43 ± 1")
    assert row_of(text, "NoCompression")["accuracy, %"] == "90.00"
    assert "CPU, 2 cores of AMD EPYC; 1 node with 2 ranks" in text and "torch 2.15.0" in text
    for name in ("accuracy", "loss"):
        assert f"(figures/{name}.png)" in text and (tmp_path / "out" / "figures" / f"{name}.png").exists()


def test_a_language_model_s_page_has_its_loss(tmp_path):
    folder = write_run(tmp_path / "0")
    metrics = pd.read_csv(folder / "metrics.csv").rename(columns={"val_acc": "val_loss"})
    metrics.to_csv(folder / "metrics.csv", index=False)
    summary = json.loads((folder / "summary.json").read_text())
    summary.update(val_loss=2.0, val_bits_per_byte=2.8854)
    del summary["val_acc"]
    (folder / "summary.json").write_text(json.dumps(summary))
    text = report.write([folder]).read_text()
    row = row_of(text, "DGC")
    assert (row["loss, nats"], row["bits per byte"], row["N"]) == ("2.0000", "2.8854", "2") and "accuracy, %" not in row
    assert "(figures/validation_loss.png)" in text and "accuracy.png" not in text
    write_run(tmp_path / "1", compressor="OneBit")
    rows = [row_of(report.write([tmp_path], tmp_path / "out").read_text(), name) for name in ("DGC", "OneBit")]
    assert [(row["accuracy, %"], row["loss, nats"]) for row in rows] == [("", "2.0000"), ("90.00", "")]


def test_a_group_s_curve_has_the_mean_at_the_steps_that_all_seeds_have(tmp_path):
    write_run(tmp_path / "0", (0.5, 0.8))
    write_run(tmp_path / "1", (0.7, 0.9, 0.95), seed=1)
    [group] = grouped(find([tmp_path]))
    points = group.curve(MEGABYTES, "val_acc")
    assert np.allclose(points[MEGABYTES], [2, 4]) and np.allclose(points["mean"], [0.6, 0.85])
    assert np.allclose(points["sd"], np.array([0.2, 0.1]) / 2**0.5)


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([{"seed": 0}, {"seed": 3}], ["DGC"]),
        ([{"sparsity": 0.99}, {"sparsity": 0.999}, {"compressor": "OneBit"}],
         ["DGC compressor.sparsity=0.99", "DGC compressor.sparsity=0.999", "OneBit"]),
        ([{"exclude": ["fc.*"], "clip_norm": None}, {"exclude": [], "clip_norm": 1.0}],
         ["DGC compressor.exclude=[fc.*] compressor.clip_norm=null",
          "DGC compressor.exclude=[] compressor.clip_norm=1.0"]),
        ([{}, {"optimizer": "AdamW", "lr": 0.001}], ["DGC optimizer=SGD", "DGC optimizer=AdamW"]),
        ([{"world": 2}, {"world": 4, "devices": 4}], ["DGC N=2", "DGC N=4"]),
        ([{}, {"strategy": "DelayedStrategy"}], ["DGC", "DGC DelayedStrategy"]),
    ],
)  # fmt: skip
def test_a_label_says_in_what_a_group_differs(tmp_path, runs, expected):
    for number, options in enumerate(runs):
        write_run(tmp_path / str(number), **options)
    assert [group.label for group in grouped(find([tmp_path]))] == expected


def test_a_run_that_has_not_ended_is_left_out(tmp_path, capsys):
    for number in range(11):
        write_run(tmp_path / str(number), ended=number != 1, seed=number)
    assert [run.options["seed"] for run in find([tmp_path])] == [0, *range(2, 11)]
    assert capsys.readouterr().err.endswith(f"it has not finished: {tmp_path / '1'}\n")


def test_one_process_sends_nothing_and_an_option_may_hold_any_sign(tmp_path):
    write_run(tmp_path / "0", world=1, options="$a|b$")
    write_run(tmp_path / "1", world=1, options="c")
    text = report.write([tmp_path], tmp_path / "out").read_text()
    assert "`compressor.options=$a\\|b$`" in text


def test_where_the_report_goes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "draw", lambda *_: None)
    write_run(tmp_path / "sweep" / "0")
    write_run(tmp_path / "sweep" / "1", seed=1)
    assert report.main(["sweep/0"]) == report.main(["sweep"]) == report.main(["sweep", "--out", "other"]) == 0
    assert capsys.readouterr().out.split() == [f"{tmp_path}/sweep/0/report.md", "report/report.md", "other/report.md"]
    assert (tmp_path / "other" / "report.md").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "gradcomp report: got 'nothing', allowed: RUN"),
        (["good", "--fast"], "gradcomp report: got '--fast', allowed: RUN"),
        (["gone"], "RUN: got 'gone', allowed: a folder that exists"),
        (["begun"], r"RUN: got 'begun', allowed: a run that has ended: its folder has metrics.csv .* and summary.json"),
        (["broken"], r"broken can't be read: JSONDecodeError"),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "begun", ended=False)
    (write_run(tmp_path / "broken") / "summary.json").write_text("{")
    with pytest.raises(ValueError, match=sentence):
        report.main(words)
