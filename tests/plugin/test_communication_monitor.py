"""CommunicationMonitor on one rank: what it keeps, and what it says before a fit."""

import pickle
import warnings
from unittest import mock

import lightning as L
import pytest
import torch
from features_kit import QUIET, Kept
from features_kit import OneLayer as Net

import lightning_gradcomp as lgc


class WithoutSparsity(L.Callback):
    """Reports as a compressed step of 1-bit SGD does."""

    def on_train_batch_end(self, trainer, *_):
        trainer.strategy.averager.spent.sparsity = None


def monitored(steps):
    """A monitor after a fit of so many steps."""
    monitor = lgc.CommunicationMonitor()
    trainer = L.Trainer(strategy="dgc", accelerator="cpu", devices=1, max_epochs=1, callbacks=[monitor], **QUIET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Net(), torch.ones(steps, 4))
    return monitor


def test_the_size_of_a_monitor_is_bounded():
    with mock.patch("lightning_gradcomp.plugin.communication_monitor.RECENT_STEPS", 5):
        few, many = monitored(8), monitored(40)
    torch.distributed.destroy_process_group()
    assert (few.summary()["steps"], many.summary()["steps"]) == (8, 40)
    assert many.summary()["milliseconds"]["compute"] > 0
    sizes = [len(pickle.dumps(vars(monitor))) for monitor in (few, many)]
    assert sizes[1] < sizes[0] + 100


@pytest.mark.filterwarnings("ignore")
def test_a_step_without_a_sparsity_logs_none():
    logger = Kept()
    callbacks = [WithoutSparsity(), lgc.CommunicationMonitor()]
    options = {**QUIET, "logger": logger, "log_every_n_steps": 1, "callbacks": callbacks, "max_epochs": 1}
    L.Trainer(strategy="dgc", accelerator="cpu", devices=1, **options).fit(Net(), torch.ones(2, 4))
    torch.distributed.destroy_process_group()
    steps = [metrics for metrics in logger.metrics if "comm/bytes_sent" in metrics]
    assert len(steps) == 2
    assert not any("comm/sparsity" in metrics for metrics in steps)


def test_a_fit_that_compresses_nothing_ends_with_a_warning():
    trainer = L.Trainer(
        strategy="dgc", accelerator="cpu", devices=1, max_epochs=1, callbacks=[lgc.CommunicationMonitor()], **QUIET
    )
    with pytest.warns(UserWarning, match=r"DGC compressed no step of this run: there is one rank\."):
        trainer.fit(Net(), torch.ones(3, 4))
    torch.distributed.destroy_process_group()


def test_a_summary_without_a_fit():
    with pytest.raises(RuntimeError, match="no fit with this monitor has ended"):
        lgc.CommunicationMonitor().summary()
