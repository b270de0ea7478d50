"""Every recipe builds, and holds the hyper-parameters of the reference that it names."""

import subprocess

import pytest
import torch
from omegaconf import OmegaConf

import lightning_gradcomp as lgc
from lightning_gradcomp.app.compose import shipped
from lightning_gradcomp.app.train import list_recipes
from tests.app.conftest import built, composed

RECIPES = sorted(path.stem for path in shipped("recipes").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_builds(recipe):
    from_scratch = ["task.weights=null"] if recipe == "finetune_text" else []
    words = f"recipe={recipe}", "dry_run=true", *from_scratch
    config, run = composed(*words), built(*words)
    assert type(run.task.model).__name__.lower().startswith(config.model._target_.rpartition(".")[2][:3])
    assert type(run.trainer.strategy.compressor).__name__ == config.compressor._target_.rpartition(".")[2]


@pytest.mark.parametrize(
    ("recipe", "model"), [("resnet18_fashion_mnist", "swin_mini"), ("swin_fashion_mnist", "resnet18")]
)
def test_a_recipe_takes_another_network(recipe, model):
    network = built(f"recipe={recipe}", f"model={model}", "dry_run=true").task.model
    assert type(network).__name__.lower().startswith(model[:4])


def test_without_words_it_is_the_digits_recipe():
    assert composed() == composed("recipe=digits")
    assert built().trainer.strategy.compressor == lgc.DGC()


@pytest.mark.parametrize(
    ("words", "option", "expected"),
    [
        (["recipe=digits_swin", "trainer.max_epochs=3"], "trainer.max_epochs", 3),
        (["recipe=digits_swin", "data=synthetic", "data.batch_size=64"], "data.batch_size", 64),
        (["recipe=swin_t_cifar10", "model=resnet18"], "model._target_", "lightning_gradcomp.app.models.resnet18"),
        (["recipe=swin_t_cifar10", "compressor=powersgd"], "compressor.rank", 4),
        (
            ["recipe=digits_sparseloco", "compressor=none"],
            "compressor",
            {"_target_": "lightning_gradcomp.NoCompression"},
        ),
        (["recipe=digits_dga", "strategy=dga", "strategy.period=2"], "strategy.period", 2),
        (["~recipe"], "optimizer.weight_decay", 5e-4),
    ],
)
def test_the_command_line_decides_over_the_recipe(words, option, expected):
    assert OmegaConf.select(composed(*words), option) == expected


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
    run = composed(f"recipe={name}")
    optimizer, augment, trainer = run.optimizer, run.augment, run.trainer
    assert reference == {
        "--epochs": trainer.max_epochs,
        "--lr for 256": optimizer.lr * 256 / run.data.batch_size,
        "--momentum": optimizer.get("momentum"),
        "--weight-decay": optimizer.weight_decay,
        "--norm-weight-decay": optimizer.weight_decay if run.task.decay_all else 0.0,
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
    run = composed("recipe=swin_t_imagenet")
    assert run.data.batch_size == 8 * 128 and run.scheduler.warmup_epochs == 20
    assert run.scheduler.end * run.optimizer.lr == pytest.approx(1e-5)  # --lr-min
    images_and_epochs = 1024 * run.callbacks.ema.update_every_n_steps / run.trainer.max_epochs
    assert run.callbacks.ema.decay == pytest.approx(1 - (1 - 0.99998) * images_and_epochs, abs=1e-5)


@pytest.mark.parametrize("batch_size", [64, 1024])
def test_an_imagenet_recipe_is_the_same_with_other_batches(batch_size):
    run = composed("recipe=resnet50_imagenet", f"data.batch_size={batch_size}")
    assert run.optimizer.lr == pytest.approx(0.1 * batch_size / 256)
    accumulated = composed("recipe=resnet50_imagenet", "trainer.accumulate_grad_batches=3")
    assert accumulated.optimizer.lr == pytest.approx(0.3)


def test_swin_s_biases_and_norms_do_not_decay():
    task = built("recipe=swin_t_cifar10", "dry_run=true").task
    optimizer = task.optimizer(task.parameter_groups())
    assert isinstance(optimizer, torch.optim.AdamW) and optimizer.defaults["fused"]
    decayed, without = optimizer.param_groups
    assert (decayed["weight_decay"], without["weight_decay"]) == (0.05, 0.0)
    names = {id(parameter): name for name, parameter in task.named_parameters()}
    left = [names[id(parameter)] for parameter in without["params"]]
    assert all("bias" in name or "norm" in name or parameter.dim() == 1
               for name, parameter in zip(left, without["params"], strict=True))  # fmt: skip
    assert any("relative_position_bias_table" in name for name in left)


def test_the_list_names_every_recipe(capsys):
    list_recipes([])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == RECIPES and max(map(len, lines)) < 200


@pytest.mark.parametrize("name", RECIPES)
def test_what_nobody_has_run_says_so_and_what_it_leaves_out(name):
    text = (shipped("recipes") / f"{name}.yaml").read_text()
    assert "# Result: " in text
    if ", measured: docs/" not in text:
        assert "not measured by us" in text and "# Left out" in text


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
