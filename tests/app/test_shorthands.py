"""Strategy names on the command line, and options of which one replaces the other."""

from dataclasses import fields

import pytest
from lightning.pytorch.strategies import StrategyRegistry

from lightning_gradcomp.app import compressors
from lightning_gradcomp.app.compose import choices
from lightning_gradcomp.app.shorthands import expand, strategies
from lightning_gradcomp.app.trainer import strategy
from lightning_gradcomp.compressors.sparseloco import SPARSELOCO
from lightning_gradcomp.registry import entries
from tests.app.test_compose import run_of


@pytest.mark.parametrize("name", strategies())
def test_a_strategy_name_makes_what_the_trainer_makes(name):
    made = strategy(run_of(*expand([f"strategy={name}", "topology=auto"])))
    if name not in ("ddp", "dga", "dist_async", "hsdp"):  # of these the command line has another default compressor
        asked = StrategyRegistry.get(name)
        assert type(made) is type(asked) and made.compressor == asked.compressor


def test_every_strategy_name_of_the_package_is_known():
    ours = {name for name, made in StrategyRegistry.items() if "gradcomp" in made["strategy"].__module__}
    assert ours == set(strategies()) - {"ddp", "hsdp"} and set(choices()["strategy"]) <= set(strategies())


def test_sparseloco_has_its_options_and_takes_others():
    run = run_of(*expand(["recipe=digits", "strategy=sparseloco", "strategy.period=30"]))
    assert run.compressor == SPARSELOCO["compressor"]
    assert (run.strategy.period, run.strategy.delay, run.strategy.error_decay) == (30, 0, 0.95)


@pytest.mark.parametrize(
    ("line", "expanded"),
    [
        ("strategy=dgc compressor=dgc seed=1", "strategy=ddp compressor=dgc seed=1"),
        ("strategy=dgc,ddp_fp16", "strategy=ddp compressor=dgc,fp16"),
        ("strategy=dga,ddp compressor=onebit", "strategy=dga,ddp compressor=onebit"),
        ("optimizer.lr=0.1,0.2", "optimizer.lr=0.1,0.2 optimizer.lr_per_256=null"),
        ("optimizer.lr_per_256=0.1", "optimizer.lr_per_256=0.1 optimizer.lr=null"),
        ("optimizer.warmup_epochs=5", "optimizer.warmup_epochs=5 optimizer.warmup_steps=null"),
        ("compressor.warmup_steps=5", "compressor.warmup_steps=5 compressor.warmup_epochs=null"),
        ("model.options.width=5", "++model.options.width=5"),
        ("optimizer.lr=1 optimizer.lr_per_256=2", "optimizer.lr=1 optimizer.lr_per_256=2"),
        (
            "trainer.checkpoint_every_n_steps=500",
            "trainer.checkpoint_every_n_steps=500 trainer.checkpoint_every_n_epochs=null",
        ),
    ],
)
def test_shorthands_are_replaced(line, expanded):
    assert expand(line.split()) == expanded.split()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("strategy=dgc compressor=onebit", "compressor with strategy=dgc: got 'onebit', allowed: dgc, which it is"),
        ("strategy=sparseloco compressor=dgc", "compressor with strategy=sparseloco: got 'dgc'"),
        ("strategy=fp16", "strategy: got 'fp16', allowed: ddp, dga"),
        ("strategy=dga,dgc", "strategy in a sweep: got 'dga,dgc', allowed: all of ddp, dga"),
        ("compressor=ddp_fp16", "compressor: got 'ddp_fp16', allowed: fp16, or strategy=ddp_fp16"),
        ("compressor=none,ddp_bf16", "compressor: got 'ddp_bf16', allowed: bf16, or strategy=ddp_bf16"),
        ("compressor=dga", "compressor: got 'dga', allowed: bf16, dgc"),
        ("compressor=sparseloco", "compressor: got 'sparseloco'"),
    ],
)
def test_what_does_not_agree_is_refused(line, sentence):
    with pytest.raises(ValueError) as refused:
        expand(line.split())
    assert str(refused.value).startswith(sentence)


def test_the_command_trains_a_strategy_by_name(command):
    code, [(_, run)] = command("strategy=onebit", "trainer=smoke")
    assert not code and run.compressor == next(entry.cls() for entry in entries() if entry.name == "onebit")
    code, trained = command("strategy=onebit", "compressor=dgc")
    assert "got 'dgc', allowed: onebit" in code and not trained


def test_shorthands_are_known_beside_a_config_of_ones_own(command, tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\noptimizer: {lr: null, lr_per_256: 0.1}\n")
    network = ("model=torchvision", "model.name=vgg11", "model.options.dropout=0.1")
    code, [(_, run)] = command("-cd", ".", "recipe=mine", "strategy=sparseloco", "optimizer.lr=0.3", *network)
    assert not code and run.compressor == SPARSELOCO["compressor"]
    assert (run.optimizer.lr, run.optimizer.lr_per_256, run.model.options) == (0.3, None, {"dropout": 0.1})
    assert expand(["strategy=mine"], own_config=True) == ["strategy=mine"]


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_listed_options_compose_to_the_defaults(entry):
    lines = compressors.options_of(entry.name).splitlines()
    options = [line.strip() for line in lines if line.startswith("  compressor.")]
    assert len(options) == len(fields(entry.cls))
    assert run_of(f"compressor={entry.name}", *options).compressor == entry.cls()
    assert entry.name in compressors.table() and entry.description in compressors.table()


def test_the_command_lists_compressors(command, capsys):
    assert command("compressors")[0] == 0 and "powersgd" in capsys.readouterr().out
    assert command("compressors", "dgc")[0] == 0 and "compressor.min_elements=1024" in capsys.readouterr().out
    assert command("compressors", "ddp_fp16")[0] == 0 and "no options" in capsys.readouterr().out
    assert "compressor: got 'nope', allowed: bf16, dgc" in command("compressors", "nope")[0]
