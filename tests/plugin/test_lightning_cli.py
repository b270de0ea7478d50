"""LightningCLI sets the options of strategies and compressors."""

import math
from datetime import timedelta

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import lightning_gradcomp as lgc

pytest.importorskip("jsonargparse")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:jsonargparse")
DGC = {"class_path": "lightning_gradcomp.DGC", "init_args": {"sparsity": 0.99, "exclude": ["head.*"]}}


def made(strategy, **options):
    """The strategy that a config with these options makes."""
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(Trainer, "trainer")
    chosen = {"class_path": f"lightning_gradcomp.{strategy}", "init_args": options}
    config = parser.parse_object({"trainer": {"accelerator": "cpu", "logger": False, "strategy": chosen}})
    made = parser.instantiate_classes(config).trainer.strategy
    assert type(made) is getattr(lgc, strategy)
    return made


def test_a_config_file(tmp_path, monkeypatch):
    config = tmp_path / "config.yaml"
    chosen = "{class_path: lightning_gradcomp.OneBit, init_args: {warmup_epochs: 2}}"
    chosen = f"{{class_path: lightning_gradcomp.DelayedStrategy, init_args: {{compressor: {chosen}}}}}"
    config.write_text(f"trainer: {{accelerator: cpu, logger: false, strategy: {chosen}}}")
    monkeypatch.setattr("sys.argv", ["fit.py", "--config", str(config), "--seed_everything", "0"])
    cli = LightningCLI(LightningModule, run=False, save_config_callback=None)
    assert type(cli.trainer.strategy) is lgc.DelayedStrategy
    assert cli.trainer.strategy.compressor == lgc.OneBit(warmup_epochs=2)


@pytest.mark.parametrize(
    "strategy", ["CompressedDDPStrategy", "CompressedHSDPStrategy", "DelayedStrategy", "AsyncStrategy"]
)
def test_compressors_and_timeouts(strategy):
    assert made(strategy).compressor == getattr(lgc, strategy)().compressor
    assert made(strategy, compressor="onebit").compressor == lgc.OneBit()
    strategy = made(strategy, compressor=DGC, timeout="0:15:00", process_group_backend="gloo")
    assert strategy.compressor == lgc.DGC(sparsity=0.99, exclude=["head.*"])
    assert strategy._timeout == timedelta(minutes=15)
    assert strategy.process_group_backend == "gloo"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"find_unused_parameters": True},
        {"static_graph": True, "bucket_cap_mb": 50},
        {"gradient_as_bucket_view": False},
        {"broadcast_buffers": False},
    ],
    ids=str,
)
def test_ddps_options_are_those_of_a_script(options):
    """Though LightningCLI passes every default of DDP's."""
    made_here = lgc.CompressedDDPStrategy(**options)
    assert made("CompressedDDPStrategy", **options)._ddp_kwargs == made_here._ddp_kwargs


def test_an_option_that_only_ddp_uses_raises():
    with pytest.raises(ValueError, match="got 'find_unused_parameters', allowed: no DDP options"):
        made("DelayedStrategy", find_unused_parameters=True)


def test_own_options():
    outer = {"class_path": "lightning_gradcomp.Nesterov", "init_args": {"lr": 0.5}}
    rounds = made("DelayedStrategy", delay="auto", period=4, outer=outer, participation=0.5).rule
    assert (rounds["delay"], rounds["outer"], rounds["participation"]) == ("auto", lgc.Nesterov(lr=0.5), 0.5)
    sharded = made("CompressedHSDPStrategy", shard=2, save_distributed_checkpoint=False)
    assert (sharded.replicate, sharded.shard) == ("auto", 2)
    assert made("AsyncStrategy", staleness=2).staleness == 2
    assert made("AsyncStrategy", staleness=math.inf).staleness == math.inf
    with pytest.raises(ValueError, match=r"staleness: got 2\.5, allowed: a whole number from 0"):
        made("AsyncStrategy", staleness=2.5)
