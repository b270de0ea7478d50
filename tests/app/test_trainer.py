"""The Trainer has what the options ask for; the bar speaks of bytes as people do."""

import io
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, LambdaCallback, ModelCheckpoint
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from torch.utils.data import DataLoader

from lightning_gradcomp.app.callbacks import ProgressBar, SeedEachStep
from lightning_gradcomp.app.options import logger
from lightning_gradcomp.app.train import saved
from lightning_gradcomp.app.trainer import LAST, build_trainer
from lightning_gradcomp.plugin import CommunicationMonitor, SparsityWarmup
from tests.app.test_compose import run_of
from tests.app.test_parts import pretend_gpus


def trainer_of(tmp_path, *overrides):
    return build_trainer(run_of(*overrides), tmp_path, CommunicationMonitor(), ("cpu", 1, 1))


def test_options_reach_the_trainer(tmp_path):
    words = (
        "trainer.patience=3",
        "trainer.profiler=simple",
        "trainer.gradient_clip_val=2",
        "trainer.precision=bf16-mixed",
    )
    trainer = trainer_of(tmp_path, *words)
    assert trainer.early_stopping_callback.patience == 3 and trainer.early_stopping_callback.monitor == "val_acc"
    assert isinstance(trainer.profiler, SimpleProfiler) and trainer.profiler.dirpath == tmp_path
    assert (trainer.gradient_clip_val, trainer.precision) == (2, "bf16-mixed")
    assert [type(logger) for logger in trainer.loggers] == [CSVLogger]


def test_a_warm_up_and_saving_reach_the_trainer(tmp_path):
    words = ("sparsity_warmup.schedule=[0.5,0.9]", "sparsity_warmup.by=step", "sparsity_warmup.dense=3")
    often = ("trainer.checkpoint_every_n_epochs=null", "trainer.checkpoint_every_n_steps=7")
    trainer = trainer_of(tmp_path, *words, *often)
    [warmup] = [callback for callback in trainer.callbacks if isinstance(callback, SparsityWarmup)]
    assert (list(warmup.schedule), warmup.by, warmup.dense) == ([0.5, 0.9], "step", 3)
    assert trainer.checkpoint_callbacks[1]._every_n_train_steps == 7
    assert not any(isinstance(callback, SparsityWarmup) for callback in trainer_of(tmp_path).callbacks)


@pytest.mark.parametrize(("every", "written"), [(2, True), (3, False)])
def test_the_last_step_is_saved_once(tmp_path, every, written):
    run = run_of("compressor=none", "trainer.max_epochs=2", f"trainer.checkpoint_every_n_epochs={every}")
    [_, periodic, *_] = build_trainer(run, tmp_path, CommunicationMonitor(), ("cpu", 1, 1)).checkpoint_callbacks
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(max_epochs=2, limit_train_batches=2, limit_val_batches=0, callbacks=[periodic], **quiet)
    trainer.fit(BoringModel())
    assert saved(trainer) == (tmp_path / LAST).exists() == written


@pytest.mark.parametrize("words", [(), ("strategy=dga", "compressor=none"), ("strategy=dist_async", "compressor=none")])
@pytest.mark.parametrize(("gpus", "ranks", "places"), [(1, 2, [0, 0]), (2, 3, [0, 1, 0])])
def test_ranks_share_gpus_over_gloo(words, gpus, ranks, places, tmp_path, monkeypatch, caplog):
    pretend_gpus(monkeypatch, gpus)
    run = run_of("topology=auto", *words)
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        trainer = build_trainer(run, tmp_path, CommunicationMonitor(), ("cuda", ranks, 1))
    assert (trainer.world_size, trainer.num_devices, trainer.strategy.process_group_backend) == (ranks, ranks, "gloo")
    for rank, place in enumerate(places):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert trainer.strategy.root_device == torch.device("cuda", place)
    assert f"{ranks} ranks share {gpus} GPU" in caplog.text


def test_a_rank_with_a_gpu_of_its_own_has_the_backend_of_lightning(tmp_path, monkeypatch):
    pretend_gpus(monkeypatch, 2)
    trainer = build_trainer(run_of(), tmp_path, CommunicationMonitor(), ("cuda", 2, 1))
    assert trainer.strategy.parallel_devices == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert trainer.strategy.process_group_backend is None  # Lightning takes NCCL


def test_a_moving_average_reaches_the_trainer(tmp_path):
    trainer = trainer_of(tmp_path, "trainer.ema_decay=0.9", "trainer.ema_every_n_steps=4")
    [average] = [callback for callback in trainer.callbacks if isinstance(callback, EMAWeightAveraging)]
    assert [average.should_update(step_idx=step) for step in (0, 3, 7, 8)] == [True, False, False, True]


def test_ranks_draw_other_numbers_and_a_resumed_run_the_same():
    def drawn(rank, epoch, batch):
        trainer = SimpleNamespace(global_rank=rank, current_epoch=epoch)
        SeedEachStep(5).on_train_batch_start(trainer, None, None, batch)
        return torch.rand(4).tolist()

    assert drawn(0, 1, 2) == drawn(0, 1, 2)
    places = [(0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3)]
    assert len({tuple(drawn(*place)) for place in places}) == 4


def test_without_them_there_is_none_of_it(tmp_path):
    trainer = trainer_of(tmp_path, "logger=none")
    kinds = [type(callback) for callback in trainer.callbacks]
    assert EarlyStopping not in kinds and not trainer.loggers and trainer.gradient_clip_val is None
    assert kinds.count(ModelCheckpoint) == 2


@pytest.mark.parametrize("mode", [("dry_run=true",), ("evaluate=true", "ckpt=some.ckpt")])
def test_what_keeps_nothing_has_no_checkpoints_and_no_loggers(tmp_path, mode):
    trainer = trainer_of(tmp_path, *mode, "trainer.patience=3")
    assert not trainer.checkpoint_callbacks and not trainer.loggers and not trainer.early_stopping_callbacks


def test_a_dry_run_has_no_dense_start(tmp_path):
    assert trainer_of(tmp_path, "compressor=onebit").strategy.compressor.dense_steps == 22
    assert trainer_of(tmp_path, "compressor=onebit", "dry_run=true").strategy.compressor.dense_steps == 0


def test_a_logger_whose_package_is_missing_is_refused(monkeypatch):
    monkeypatch.setattr(logger, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^needs a package for logger=wandb: pip install wandb"):
        logger.check_installed(run_of("logger=wandb").logger)
    logger.check_installed(run_of("logger=csv").logger)


def test_the_bar_fits_into_100_columns():
    bar = ProgressBar()
    sent = {"sent_MB": 123.456, "ratio(N=1024)": 1234.5}
    shown = {"train_loss": 12.345, "val_acc": 0.98765, "val_loss": 1.0, **sent}
    trainer = SimpleNamespace(progress_bar_metrics=shown, loggers=[])
    drawn = io.StringIO()
    line = Tqdm(desc="Epoch 299", total=5004, file=drawn, bar_format=bar.BAR_FORMAT, ncols=100, smoothing=0)
    line.start_t -= 40_000
    line.n = 2500
    line.set_postfix(bar.get_metrics(trainer, None))
    last = drawn.getvalue().split("\r")[-1]
    assert "loss=12.30, acc=0.988, sent=123 MB (1,234x)" in last and len(last) <= 100
    line.close()


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_the_bar_of_a_run_that_resumes_amid_an_epoch_has_its_name_and_length(tmp_path):
    bar, path = ProgressBar(), tmp_path / "amid.ckpt"

    def save_amid(trainer, module, outputs, batch, batch_idx):
        if batch_idx == 2:
            trainer.save_checkpoint(path)

    def fit(**options):
        quiet = {"logger": False, "enable_model_summary": False, "enable_checkpointing": False}
        callbacks = [bar, LambdaCallback(on_train_batch_end=save_amid)]
        trainer = L.Trainer(max_epochs=1, accelerator="cpu", devices=1, callbacks=callbacks, **quiet)
        trainer.fit(Regression(), DataLoader(torch.randn(5, 4)), **options)

    fit()
    fit(ckpt_path=path)
    assert (bar.train_progress_bar.desc, bar.train_progress_bar.total) == ("Epoch 0: ", 5)


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_bar_tells_bytes_and_ratio_in_one_word():
    bar = ProgressBar()
    shown = {"train_loss": torch.tensor(0.5), "sent_MB": 0.102128, "ratio(N=2)": 437.6}
    trainer = SimpleNamespace(progress_bar_metrics=shown, loggers=[])
    assert bar.get_metrics(trainer, None) == {"loss": shown["train_loss"], "sent": "102 kB (438x)"}
    trainer.progress_bar_metrics = {"train_loss": 0.5}  # before the first step
    assert bar.get_metrics(trainer, None) == {"loss": 0.5}
