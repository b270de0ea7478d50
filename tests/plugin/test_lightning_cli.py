"""LightningCLI sets the options of strategies and compressors."""

import sys

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI

import lightning_gradcomp as lgc

pytest.importorskip("jsonargparse")


@pytest.mark.parametrize(
    ("strategy", "compressor", "options"),
    [
        ("CompressedDDPStrategy", lgc.DGC(sparsity=0.99, exclude=["head.*"]), "{sparsity: 0.99, exclude: ['head.*']}"),
        ("CompressedDDPStrategy", lgc.NoCompression(), "{}"),
        ("DelayedStrategy", lgc.OneBit(warmup_epochs=2), "{warmup_epochs: 2}"),
    ],
)
def test_options_of_a_compressor(tmp_path, monkeypatch, strategy, compressor, options):
    config = tmp_path / "config.yaml"
    chosen = f"{{class_path: lightning_gradcomp.{type(compressor).__name__}, init_args: {options}}}"
    chosen = f"{{class_path: lightning_gradcomp.{strategy}, init_args: {{compressor: {chosen}}}}}"
    config.write_text(f"trainer: {{accelerator: cpu, logger: false, strategy: {chosen}}}")
    monkeypatch.setattr(sys, "argv", ["fit.py", "--config", str(config), "--seed_everything", "0"])
    cli = LightningCLI(LightningModule, run=False, save_config_callback=None)
    assert type(cli.trainer.strategy) is getattr(lgc, strategy)
    assert cli.trainer.strategy.compressor == compressor
