"""Composed configs: every recipe, every compressor, what is refused, and config.yaml written and read."""

from dataclasses import fields
from datetime import timedelta

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lightning_gradcomp.app import run_folder
from lightning_gradcomp.app.arguments import ALONE
from lightning_gradcomp.app.compose import checked, choices, register, shipped
from lightning_gradcomp.app.config import Run
from lightning_gradcomp.app.options import training
from lightning_gradcomp.app.options.data import Digits
from lightning_gradcomp.app.options.training import SGD, AdamW
from lightning_gradcomp.app.trainer import strategy
from lightning_gradcomp.compressors import DGC, NoCompression
from lightning_gradcomp.local_sgd.outer_optimizer import Nesterov
from lightning_gradcomp.plugin import CompressedDDPStrategy, DelayedStrategy
from lightning_gradcomp.registry import entries

register()


def run_of(*overrides: str) -> Run:
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        return checked(compose("train", overrides=list(overrides)))


def test_without_arguments_it_is_the_digits_recipe():
    run = run_of()
    assert run == run_of("recipe=digits")
    assert (run.model.name, run.data, run.seed) == ("resnet18", Digits(batch_size=64, fold=None, dirichlet=None), 0)
    assert run.compressor == DGC(sparsity=None, values="int2", warmup_epochs=None)
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
def test_every_compressor_has_its_own_defaults(entry):
    assert run_of(f"compressor={entry.name}").compressor == entry.cls()


@pytest.mark.parametrize("recipe", choices()["recipe"])
def test_every_option_of_a_recipe_is_composed(recipe):
    options = OmegaConf.to_container(OmegaConf.load(shipped("recipes") / f"{recipe}.yaml"))
    run = run_of(f"recipe={recipe}")
    for group, values in options.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            got = getattr(getattr(run, group), name)
            assert got == (float(value) if isinstance(got, float) else value)  # YAML's 5e-3 is a string


@pytest.mark.parametrize(
    ("overrides", "group", "option", "expected"),
    [
        (["recipe=digits_swin", "trainer=smoke"], "trainer", "max_epochs", 2),
        (["recipe=digits_swin", "trainer=default"], "trainer", "max_epochs", 30),  # the recipe's own choice
        (["recipe=digits_swin", "data=synthetic"], "data", "batch_size", 64),
        (["recipe=digits_swin", "data=synthetic", "data.batch_size=32"], "data", "batch_size", 32),
        (["recipe=resnet18_cifar10", "optimizer=adamw", "compressor=none"], "optimizer", "lr", 0.001),
        (["recipe=digits", "optimizer=sgd"], "optimizer", "weight_decay", 5e-3),
        (["recipe=swin_t_cifar10", "model=resnet18"], "model", "name", "resnet18"),
        (["recipe=swin_t_cifar10", "augment=none"], "augment", "mixup", 0),
        (["recipe=digits_dga", "strategy=dga", "strategy.period=2", "strategy.delay=2"], "strategy", "period", 2),
        (["~recipe"], "optimizer", "weight_decay", 5e-4),
    ],
)
def test_the_command_line_decides_over_the_recipe(overrides, group, option, expected):
    assert getattr(getattr(run_of(*overrides), group), option) == expected


GROUPS = ["model", "data", "augment", "strategy", "optimizer", "trainer", "logger"]


@pytest.mark.parametrize("group", GROUPS)
def test_every_choice_of_every_group_composes(group, monkeypatch):
    monkeypatch.setattr(training, "find_spec", lambda name: name)  # timm
    needs = {
        "augment": ("data=cifar10",),
        "custom": ("model.target=module:Net",),
        "timm": ("model.name=resnet18",),
        "torchvision": ("model.name=resnet18",),
    }
    for choice in choices()[group]:
        words = (*needs.get(group, ()), *needs.get(choice, ()))
        assert isinstance(run_of(f"{group}={choice}", "compressor=none", *words), Run)


def test_options_reach_the_compressor_with_their_types():
    run = run_of("compressor.sparsity=0.5", "compressor.exclude=[head.*]", "compressor.clip_norm=2")
    assert run.compressor == DGC(sparsity=0.5, exclude=["head.*"], clip_norm=2.0)


def test_adamw_fits_a_compressor_without_momentum():
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
def test_a_run_is_written_and_read(overrides, tmp_path):
    run = run_of(*overrides)
    run_folder.save(run, tmp_path)
    assert run_folder.load(tmp_path) == run


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["optimizer.lr_per_256=0.1"], "optimizer.lr with lr_per_256=0.1: got 0.02, allowed: one of the two"),
        (["optimizer.warmup_steps=null"], "optimizer.warmup_steps with warmup_epochs=None: got None, allowed: one of"),
        (["optimizer.warmup_steps=null", "optimizer.warmup_epochs=-1"], "optimizer.warmup_epochs: got -1.0"),
        (["optimizer.end=2"], "optimizer.end: got 2.0, allowed: 0 to 1"),
        (["trainer.ema_decay=1"], "trainer.ema_decay: got 1.0, allowed: 0 < ema_decay < 1, or null"),
        (["augment.repeats=2"], "augment.repeats with data=digits: got 2, allowed: 1"),
        (["augment.resize=9"], "augment.resize with data=digits: got 9, allowed: None: images are not augmented"),
        (["augment.interpolation=bicubic"], "augment.interpolation with data=digits: got 'bicubic', allowed: bilinear"),
        (
            ["data=imagefolder", "augment.resize=100"],
            "augment.resize: got 100, allowed: null, or from data.size=224 on",
        ),
        (["sparsity_warmup.dense=2"], "sparsity_warmup.dense without a schedule: got 2, allowed: 0; others with"),
        (["sparsity_warmup.periods=8"], "sparsity_warmup.periods without a schedule: got 8, allowed: 4; others with"),
        (
            ["strategy=dga", "strategy.outer_momentum=0.5"],
            "strategy.outer_momentum without outer_lr: got 0.5, allowed: 0.9: there is no outer optimizer",
        ),
        (["augment.interpolation=nearest"], "augment.interpolation: got 'nearest', allowed: bilinear, bicubic"),
        (["data=cifar10", "data.prefetch=0"], "data.prefetch: got 0"),
        (["strategy.timeout=0"], "strategy.timeout: got 0.0, allowed: a finite number of seconds above 0"),
        (["strategy.checkpoint_state=all"], "strategy.checkpoint_state: got 'all', allowed: auto, gather, sidecar"),
        (
            ["strategy=dist_async", "topology=auto", "strategy.checkpoint_state=mean"],
            "strategy.checkpoint_state with strategy=dist_async: got 'mean'",
        ),
        (
            ["strategy=dist_async", "optimizer=adamw"],
            "compressor with strategy=dist_async optimizer=adamw: got 'dgc', allowed: none, fp16, bf16",
        ),
        (
            ["strategy=dist_async", "optimizer=adamw", "compressor=none", "strategy.pull=onebit"],
            "strategy.pull with strategy=dist_async optimizer=adamw: got 'onebit'",
        ),
        (
            ["strategy=dga", "strategy.checkpoint_state=mean"],
            "strategy.checkpoint_state without error_decay: got 'mean'",
        ),
        (["strategy=hsdp", "strategy.shard=0"], "strategy.shard: got 0, allowed: auto, or a whole number"),
        (["strategy=hsdp", "topology=two_phase"], "topology with strategy=hsdp: got 'two_phase', allowed: auto, all_"),
        (["strategy=hsdp", "inside=dense"], "inside with strategy=hsdp: got 'dense', allowed: null: FSDP averages"),
        (["trainer.ema_every_n_steps=5"], "trainer.ema_every_n_steps without trainer.ema_decay: got 5, allowed: 32;"),
        (["model.target=module:Net"], "model.target with model=resnet18: got 'module:Net', allowed: null; or model="),
        (["recipe=resnet18_cifar10", "augment.resize=40"], "augment.resize: got 40, allowed: null: images of 64"),
        (["recipe=imagefolder", "data.size=64", "augment.resize=100"], "augment.resize: got 100, allowed: null: im"),
        (
            ["sparsity_warmup=linear", "compressor.start_sparsity=0.75"],
            "compressor.start_sparsity with sparsity_warmup: got 0.75, allowed: None",
        ),
        (
            ["sparsity_warmup=linear", "compressor=gradient_dropping", "compressor.warmup_epochs=2"],
            "compressor.warmup_epochs with sparsity_warmup: got 2, allowed: None",
        ),
        (
            ["sparsity_warmup=linear", "compressor=gradient_dropping", "compressor.warmup_steps=2"],
            "compressor.warmup_steps with sparsity_warmup: got 2, allowed: None",
        ),
        (["strategy=hsdp", "trainer.ema_decay=0.9"], "trainer.ema_decay with strategy=hsdp: got 0.9, allowed: null"),
        (["strategy=hsdp", "trainer.channels_last=true"], "trainer.channels_last with strategy=hsdp: got True"),
        (["strategy.verify_replicas_every_n_steps=0"], "strategy.verify_replicas_every_n_steps: got 0"),
        (["trainer.checkpoint_every_n_steps=9"], "trainer.checkpoint_every_n_epochs with checkpoint_every_n_steps=9"),
        (
            ["sparsity_warmup=linear", "sparsity_warmup.by=year"],
            "sparsity_warmup.by: got 'year', allowed: epoch, step, coverage",
        ),
        (["sparsity_warmup.schedule=cubic"], "schedule: got 'cubic', allowed: 'exponential', 'linear'"),
        (["sparsity_warmup.schedule=[0.5,2]"], "sparsity level: got 2, allowed: 0 <= sparsity < 1"),
        (
            ["sparsity_warmup=linear", "compressor=onebit"],
            "compressor with sparsity_warmup: got 'onebit', allowed: dgc",
        ),
        (["sparsity_warmup=linear", "strategy=dga"], "strategy with sparsity_warmup: got 'dga', allowed: ddp"),
        (["model=custom", "model.target=Net"], "model.target: got 'Net', allowed: module:Name"),
        (["++model.options={depth: 3}"], "model.options with model=resnet18: got {'depth': 3}"),
        (["model=torchvision"], "model.name: got None, allowed: a value of yours"),
        (["+compressor.foo=1"], "compressor.foo: got 1, allowed: min_elements, exclude"),
        (["+optimizer.foo=1"], "optimizer.foo: got 1, allowed: lr, lr_per_256, weight_decay"),
        (["+foo=1"], "foo: got 1, allowed: seed, topology, inside"),
        (["compressor=powersgd", "compressor.dense_values=bf16"], "PowerSGD.dense_values: got 'bf16', allowed: fp32"),
        (["compressor.sparsity=1.5"], "DGC.sparsity: got 1.5, allowed: 0 <= sparsity < 1"),
        (["optimizer.lr=-1"], "optimizer.lr: got -1.0, allowed: 0 or more"),
        (["optimizer.momentum=1"], "optimizer.momentum: got 1.0"),
        (["optimizer.nesterov=true", "optimizer.momentum=0"], "optimizer.nesterov: got True, allowed: false without"),
        (["trainer.devices=0"], "trainer.devices: got 0, allowed: auto, or a whole number from 1"),
        (["trainer.devices=two"], "trainer.devices: got 'two'"),
        (["trainer.num_nodes=1.5"], "trainer.num_nodes: got 1.5"),
        (["trainer.precision=8"], "trainer.precision: got '8', allowed: 32-true"),
        (["trainer.accelerator=tpu"], "trainer.accelerator: got 'tpu', allowed: auto, cpu, cuda"),
        (["trainer.limit_train_batches=0"], "trainer.limit_train_batches: got 0"),
        (["model.name=vgg"], "model.name: got 'vgg', allowed: resnet18, resnet50, swin_mini"),
        (["augment=basic"], "augment.crop_and_flip with data=digits: got True, allowed: False"),
        (["data=synthetic", "augment.random_erase=0.1"], "augment.random_erase with data=synthetic: got 0.1"),
        (["augment.label_smoothing=2"], "augment.label_smoothing: got 2.0, allowed: 0 to 1"),
        (["augment.mixup=-1"], "augment.mixup: got -1.0"),
        (["data=synthetic", "data.classes=1"], "data.classes: got 1, allowed: a whole number from 2"),
        (["data=imagefolder", "data.size=4"], "data.size: got 4, allowed: a whole number from 8"),
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
        (["strategy=dga", "strategy.delay=9"], "strategy.delay: got 9, allowed: auto, or a whole number from 0 to 8"),
        (["strategy=dga", "strategy.period=0"], "strategy.period: got 0"),
        (["strategy=dga", "strategy.outer_lr=0"], "Nesterov.lr: got 0.0"),
        (["strategy=dga", "strategy.outer_lr=inf"], "strategy.outer_lr: got inf"),
        (["strategy=dga", "strategy.delay=true"], "strategy.delay: got True"),
        (["optimizer.lr=nan"], "optimizer.lr: got nan, allowed: 0 or more, and finite"),
        (["optimizer.lr=inf"], "optimizer.lr: got inf"),
        (["optimizer.weight_decay=nan"], "optimizer.weight_decay: got nan"),
        (["optimizer.momentum=nan"], "optimizer.momentum: got nan"),
        (["augment.mixup=inf"], "augment.mixup: got inf"),
        (["augment.label_smoothing=nan"], "augment.label_smoothing: got nan"),
        (["trainer.gradient_clip_val=nan"], "trainer.gradient_clip_val: got nan, allowed: a finite norm above 0"),
        (["trainer.gradient_clip_val=inf"], "trainer.gradient_clip_val: got inf"),
        (["trainer.devices=true"], "trainer.devices: got True, allowed: auto, or a whole number from 1"),
        (["trainer.max_epochs=10000000000"], "trainer.max_epochs: got 10000000000, allowed: a whole number from 1"),
        (["trainer.patience=10000000000"], "trainer.patience: got 10000000000, allowed: null, or a whole number"),
        (["data.dirichlet=0"], "data.dirichlet: got 0.0, allowed: 0.01 or more, and finite"),
        (
            ["recipe=digits_dga", "strategy.participation=0"],
            "participation: got 0.0, allowed: a number above 0",
        ),
        (["recipe=resnet18_cifar10", "+data.fold=1"], "data.fold: got 1, allowed: batch_size, dir, workers, prefetch"),
        (["data.fold=5"], "data.fold: got 5, allowed: null, or a whole number from 0 to 4"),
        (["data.batch_size=99999999999"], "data.batch_size: got 99999999999"),
        (["seed=12345678901234567890"], "seed: got 12345678901234567890, allowed: a whole number from 0 to 4294967295"),
        (["strategy=dga", "topology=server", "compressor=onebit"], "topology with strategy=dga: got 'server'"),
        (["strategy=dga", "inside=dense"], "inside with strategy=dga: got 'dense', allowed: null"),
        (["~model"], "model: got None, allowed: a value of yours"),
    ],
)
def test_what_does_not_fit_is_refused(overrides, sentence):
    with pytest.raises(ValueError) as refused:
        run_of(*overrides)
    assert str(refused.value).startswith(sentence)


def test_options_of_rounds_reach_the_strategy():
    run = run_of("recipe=digits_dga", "strategy.period=4", "strategy.delay=auto", "strategy.outer_lr=0.5")
    rounds = strategy(run)
    assert isinstance(rounds, DelayedStrategy) and type(rounds.compressor) is NoCompression
    assert rounds.rule == {
        "period": 4,
        "delay": "auto",
        "outer": Nesterov(0.5, 0.9),
        "stale_only": False,
        "pending_share": None,
        "participation": 1.0,
        "error_decay": None,
    }
    assert isinstance(strategy(run_of()), CompressedDDPStrategy)


def test_waiting_checking_and_saving_reach_the_strategy():
    words = ("strategy.timeout=90", "strategy.checkpoint_state=sidecar", "strategy.verify_replicas_every_n_steps=5")
    made = strategy(run_of(*words))
    assert (made._timeout, made.checkpoint_state) == (timedelta(seconds=90), "sidecar")
    assert made.verify_replicas_every_n_steps == 5
    for name in ("dga", "dist_async"):
        more = ("topology=auto", "compressor=none", *(("strategy.error_decay=0.9",) if name == "dga" else ()))
        made = strategy(run_of(f"strategy={name}", *more, *words[:2]))
        assert (made._timeout, made.checkpoint_state) == (timedelta(seconds=90), "sidecar")


@pytest.mark.parametrize("batch_size", [64, 1024])
def test_an_imagenet_recipe_is_the_same_with_other_batches(batch_size):
    optimizer = run_of("recipe=resnet50_imagenet", f"data.batch_size={batch_size}").optimizer
    steps = 1281167 // batch_size
    assert optimizer.peak(batch_size) == pytest.approx(0.1 * batch_size / 256)
    assert optimizer.warmup(steps) == 5 * steps


def test_every_part_of_a_run_is_a_choice_or_stands_alone():
    assert {field.name for field in fields(Run)} == {*choices(), *ALONE} - {"recipe"}


def test_configs_are_found_in_a_checkout_and_a_wheel(tmp_path):
    package = tmp_path / "lightning_gradcomp"
    assert shipped("conf", package) == package / "conf"
    (tmp_path / "pyproject.toml").touch()
    assert shipped("conf", package) == tmp_path / "conf"
