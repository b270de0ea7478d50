"""Config composition: every recipe, every compressor, and the way to the training process and back."""

from dataclasses import fields

import pytest
from hydra import compose, initialize_config_dir

from lightning_gradcomp.app import run_folder
from lightning_gradcomp.app.arguments import ALONE
from lightning_gradcomp.app.compose import checked, choices, register, shipped
from lightning_gradcomp.app.config import Run
from lightning_gradcomp.app.options.data import Digits
from lightning_gradcomp.app.options.training import SGD, AdamW
from lightning_gradcomp.app.trainer import strategy
from lightning_gradcomp.compressors import DGC, NoCompression
from lightning_gradcomp.outer import Nesterov
from lightning_gradcomp.plugin import CompressedDDPStrategy, DelayedStrategy
from lightning_gradcomp.registry import entries


def run_of(*overrides: str) -> Run:
    register()
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        return checked(compose("train", overrides=list(overrides)))


def test_without_arguments_it_is_the_digits_recipe():
    run = run_of()
    assert run == run_of("recipe=digits")
    assert (run.model.name, run.data, run.seed) == ("resnet18", Digits(batch_size=64), 0)
    assert run.compressor == DGC(sparsity=0.999, dense_epochs=1, warmup_epochs=4)
    assert run.optimizer == SGD(
        lr=0.02, momentum=0.9, nesterov=False, weight_decay=5e-3, decay_all=True, warmup_steps=20
    )
    assert (run.trainer.max_epochs, run.trainer.devices) == (10, "auto")


@pytest.mark.parametrize("recipe", choices()["recipe"])
@pytest.mark.parametrize("compressor", ["dgc", "none"])
def test_every_recipe_takes_another_compressor(recipe, compressor):
    run = run_of(f"recipe={recipe}", f"compressor={compressor}", "optimizer=sgd")
    assert type(run.compressor) is {"dgc": DGC, "none": NoCompression}[compressor]


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_every_compressor_is_a_choice_with_its_own_defaults(entry):
    assert run_of(f"compressor={entry.name}").compressor == entry.cls()


GROUPS = ["model", "data", "augment", "strategy", "optimizer", "trainer", "logger"]


@pytest.mark.parametrize("group", GROUPS)
def test_every_choice_of_every_group_composes(group):
    pictures = ("data=cifar10",) if group == "augment" else ()
    for choice in choices()[group]:
        assert isinstance(run_of(f"{group}={choice}", "compressor=none", *pictures), Run)


def test_options_reach_the_compressor_with_their_types():
    run = run_of("compressor.sparsity=0.5", "compressor.exclude=[head.*]", "compressor.clip_norm=2")
    assert run.compressor == DGC(sparsity=0.5, exclude=["head.*"], clip_norm=2.0)


def test_adamw_fits_a_compressor_that_leaves_momentum_alone():
    assert isinstance(run_of("optimizer=adamw", "compressor=none").optimizer, AdamW)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("compressor=none", "optimizer=adamw", "seed=3"),
        ("compressor.clip_norm=1.5", "trainer.devices=3"),
        ("strategy=dga", "strategy.delay=auto", "strategy.outer_lr=0.7"),
        ("recipe=swin_t_imagenet", "logger=wandb", "trainer.profiler=simple", "evaluate=true", "ckpt=x.ckpt"),
    ],
)
def test_the_training_process_reads_what_the_command_line_wrote(overrides, tmp_path):
    run = run_of(*overrides)
    run_folder.save(run, tmp_path)
    assert run_folder.load(tmp_path) == run


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["+compressor.foo=1"], "compressor.foo: got 1, allowed: min_elements, exclude"),
        (["+optimizer.foo=1"], "optimizer.foo: got 1, allowed: lr, weight_decay"),
        (["+foo=1"], "foo: got 1, allowed: seed, topology, inside"),
        (["compressor.sparsity=1.5"], "DGC.sparsity: got 1.5, allowed: 0 <= sparsity < 1"),
        (["optimizer=adamw"], "optimizer with compressor=dgc: got 'adamw', allowed: sgd"),
        (["optimizer.lr=-1"], "optimizer.lr: got -1.0, allowed: 0 or more"),
        (["optimizer.momentum=1"], "optimizer.momentum: got 1.0"),
        (["optimizer.nesterov=true", "optimizer.momentum=0"], "optimizer.nesterov: got True, allowed: false without"),
        (["trainer.devices=0"], "trainer.devices: got 0, allowed: auto, or a number from 1"),
        (["trainer.devices=two"], "trainer.devices: got 'two'"),
        (["trainer.num_nodes=1.5"], "trainer.num_nodes: got 1.5"),
        (["trainer.precision=8"], "trainer.precision: got '8', allowed: 32-true"),
        (["trainer.accelerator=tpu"], "trainer.accelerator: got 'tpu', allowed: auto, cpu, cuda"),
        (["trainer.limit_train_batches=0"], "trainer.limit_train_batches: got 0"),
        (["model.name=vgg"], "model.name: got 'vgg', allowed: resnet18, resnet50, swin_mini"),
        (["augment=basic"], "augment.crop_and_flip with data=digits: got True, allowed: none"),
        (["data=synthetic", "augment.random_erase=0.1"], "augment.random_erase with data=synthetic: got 0.1"),
        (["augment.label_smoothing=2"], "augment.label_smoothing: got 2.0, allowed: 0 to 1"),
        (["augment.mixup=-1"], "augment.mixup: got -1.0"),
        (["data=synthetic", "data.classes=1"], "data.classes: got 1, allowed: 2 or more"),
        (["data=imagefolder", "data.size=4"], "data.size: got 4, allowed: 8 or more"),
        (["data=cifar10", "data.workers=-1"], "data.workers: got -1"),
        (["+data.download=true"], "data.download: got True, allowed: batch_size"),
        (["logger=wandb", "logger.mode=dark"], "logger.mode: got 'dark', allowed: online, offline"),
        (["trainer.profiler=fast"], "trainer.profiler: got 'fast', allowed: simple, advanced, pytorch"),
        (["trainer.patience=0"], "trainer.patience: got 0"),
        (["trainer.gradient_clip_val=0"], "trainer.gradient_clip_val: got 0.0"),
        (["evaluate=true"], "ckpt with evaluate=true: got None, allowed: best, last"),
        (["dry_run=true", "ckpt=last"], "ckpt with dry_run=true: got 'last', allowed: null"),
        (["seed=-1"], "seed: got -1"),
        (["topology=dist_async"], "topology: got 'dist_async', allowed: 'device', 'dist_sync', 'dist_sync_device'"),
        (["topology=dist_sync", "inside=dense"], "inside with topology='dist_sync': got 'dense', allowed: none"),
        (["inside=sparse"], "inside: got 'sparse', allowed: 'compressed', 'dense'"),
        (["residual_device=disk"], "residual_device: got 'disk', allowed: 'device', 'cpu'"),
        (["topology=ring"], "topology: got 'ring', allowed: 'auto', 'all_gather'"),
        (["strategy=dga", "strategy.delay=9"], "delay: got 9, allowed: 0 to 8, the period"),
        (["strategy=dga", "strategy.period=0"], "period: got 0"),
        (["strategy=dga", "strategy.outer_lr=0"], "Nesterov.lr: got 0.0"),
        (["strategy=dga", "topology=server", "compressor=onebit"], "topology with strategy=dga: got 'server'"),
        (["strategy=dga", "inside=dense"], "inside with strategy=dga: got 'dense', allowed: null"),
        (["~model"], "model: Missing mandatory value"),
    ],
)
def test_what_does_not_fit_is_refused(overrides, sentence):
    with pytest.raises(ValueError) as refused:
        run_of(*overrides)
    assert str(refused.value).startswith(sentence)


def test_rounds_reach_the_strategy():
    run = run_of("recipe=digits_dga", "strategy.period=4", "strategy.delay=auto", "strategy.outer_lr=0.5")
    rounds = strategy(run)
    assert isinstance(rounds, DelayedStrategy) and type(rounds.compressor) is NoCompression
    assert rounds.rule == {"period": 4, "delay": "auto", "outer": Nesterov(0.5, 0.9), "stale_only": False}
    assert isinstance(strategy(run_of()), CompressedDDPStrategy)


def test_every_part_of_a_run_is_a_choice_or_stands_alone():
    assert {field.name for field in fields(Run)} == {*choices(), *ALONE} - {"recipe"}


def test_configs_beside_the_package_in_a_checkout_and_inside_it_in_a_wheel(tmp_path):
    package = tmp_path / "lightning_gradcomp"
    assert shipped("conf", package) == package / "conf"
    (tmp_path / "pyproject.toml").touch()
    assert shipped("conf", package) == tmp_path / "conf"
