"""The table of recipes says what the recipes do."""

import subprocess

import pytest

from lightning_gradcomp.app import recipes
from lightning_gradcomp.app.compose import choices, shipped
from lightning_gradcomp.app.config import name_of
from tests.app.test_compose import run_of
from tests.pages import rows

ROWS = {row[0]: dict(zip(recipes.HEAD, row, strict=True)) for row in recipes.rows()}


def test_every_recipe_has_a_row():
    assert sorted(ROWS) == choices()["recipe"]
    table = recipes.table()
    assert all(name in table for name in ROWS) and max(map(len, table.splitlines())) < 220


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_what_the_recipe_composes_to(name):
    row, run = ROWS[name], run_of(f"recipe={name}")
    assert row["model"] == run.model.name
    for group in ("compressor", "strategy"):
        assert row[group] == name_of(group, getattr(run, group))
    assert row["data"] == name_of("data", run.data)


RESNET = {  # pytorch/vision, references/classification/train.py: the defaults, with which ResNets were trained
    "--epochs": 90, "--lr for 256": 0.1, "--momentum": 0.9, "--weight-decay": 1e-4, "--label-smoothing": 0.0,
    "--mixup-alpha": 0.0, "--cutmix-alpha": 0.0, "--random-erase": 0.0, "--interpolation": "bilinear",
    "--val-resize-size": 256, "--clip-grad-norm": None, "ra-reps": 1, "--norm-weight-decay": 1e-4,
    "--auto-augment": None,
}  # fmt: skip
SWIN = {  # the same, README.md: torchrun --nproc_per_node=8 train.py --model swin_t ...
    "--epochs": 300, "--lr for 256": 1e-3 / 4, "--momentum": None, "--weight-decay": 0.05, "--label-smoothing": 0.1,
    "--mixup-alpha": 0.8, "--cutmix-alpha": 1.0, "--random-erase": 0.25, "--interpolation": "bicubic",
    "--val-resize-size": 224, "--clip-grad-norm": 5.0, "ra-reps": 4, "--norm-weight-decay": 0.0,
    "--auto-augment": "ta_wide",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "reference"), [("resnet18_imagenet", RESNET), ("resnet50_imagenet", RESNET), ("swin_t_imagenet", SWIN)]
)
def test_a_recipe_has_the_reference_s_hyper_parameters(name, reference):
    run = run_of(f"recipe={name}")
    optimizer, augment, trainer = run.optimizer, run.augment, run.trainer
    assert reference == {
        "--epochs": trainer.max_epochs,
        "--lr for 256": optimizer.peak(256),
        "--momentum": getattr(optimizer, "momentum", None),
        "--weight-decay": optimizer.weight_decay,
        "--norm-weight-decay": optimizer.weight_decay if optimizer.decay_all else 0.0,
        "--label-smoothing": augment.label_smoothing,
        "--mixup-alpha": augment.mixup,
        "--cutmix-alpha": augment.cutmix,
        "--random-erase": augment.random_erase,
        "--interpolation": augment.interpolation,
        "--val-resize-size": augment.resize or round(run.data.size * 8 / 7),
        "--clip-grad-norm": trainer.gradient_clip_val,
        "ra-reps": augment.repeats,
        "--auto-augment": "ta_wide" if augment.trivial_augment else None,
    }


def test_swins_schedule_and_average_are_the_reference_s():
    run = run_of("recipe=swin_t_imagenet")
    assert run.data.batch_size == 8 * 128 and run.optimizer.warmup_epochs == 20
    assert run.optimizer.end * run.optimizer.peak(1024) == pytest.approx(1e-5)  # --lr-min
    images_and_epochs = 1024 * run.trainer.ema_every_n_steps / run.trainer.max_epochs
    assert run.trainer.ema_decay == pytest.approx(1 - (1 - 0.99998) * images_and_epochs, abs=1e-5)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row["measured"] != "yes"])
def test_a_recipe_says_what_it_leaves_out(name):
    assert "# Left out" in (shipped("recipes") / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", ROWS)
def test_what_nobody_has_run_says_so(name):
    text = (shipped("recipes") / f"{name}.yaml").read_text()
    assert ROWS[name]["measured"] == ("not by us" if "not measured by us" in text else "yes")
    assert ROWS[name]["measured"] == "not by us" or ROWS[name]["data"] == "digits"  # other data we never had


def test_the_docs_have_the_same_table():
    table = {cells[0].strip("`"): cells for cells in rows("docs/command_line.md", "## Recipes")}
    assert sorted(table) == sorted(ROWS)
    for name, row in ROWS.items():
        _, _, compressor, _, measured = table[name]
        assert compressor == f"`{row['compressor']}`"
        assert (measured == "yes") == (row["measured"] == "yes")


def test_the_scripts_for_two_nodes_check_their_input(tmp_path):
    torchrun, slurm = (shipped("recipes") / name for name in ("two_nodes_torchrun.sh", "two_nodes.slurm"))
    for script in (torchrun, slurm):
        subprocess.run(["bash", "-n", script], check=True)
    asked = subprocess.run(["bash", torchrun], capture_output=True, text=True, env={"PATH": "/bin:/usr/bin"})
    assert asked.returncode and "MASTER: the address of the first machine" in asked.stderr
    environment = {"PATH": "/bin:/usr/bin", "MASTER": "host", "NODE": "0", "GPUS": "a[$(touch evaluated)]"}
    asked = subprocess.run(["bash", torchrun], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert asked.returncode == 1 and "GPUS: got 'a[$(touch evaluated)]', allowed: a whole number" in asked.stderr
    assert not (tmp_path / "evaluated").exists()
