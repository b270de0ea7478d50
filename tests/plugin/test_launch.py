"""The strategy under Lightning's launcher, and what is refused before it starts a process.

torchrun's launcher is in test_faults.py, and what the main process has after forked ranks is in test_checkpoints.py.
"""

import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

import lightning_gradcomp as lgc
from lightning_gradcomp.plugin.launchers import SubprocessLauncher
from lightning_gradcomp.plugin.validation import AVERAGING_OPTIONS
from tests.processes import Forked

SCRIPT = str(Path(__file__).with_name("user_script.py"))
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture(scope="module")
def launched():
    """Launcher -> the script under it. Both at once, since the processes of each start one by one."""
    return {launcher: Forked(SCRIPT, "dgc", *words) for launcher, words in (("popen", []), ("spawn", ["spawn"]))}


@pytest.mark.parametrize("launcher", ["popen", "spawn"])
def test_a_users_script_trains(launched, launcher):
    done = launched[launcher].end()
    assert done.returncode == 0, done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("epoch")]
    assert [line.split()[3] for line in lines] == 4 * ["sparsity=0.938"] + 3 * ["sparsity=0.984"]  # of 4 steps each
    assert all("N=2" in line for line in lines)
    losses = [float(line.split("loss=")[1]) for line in lines]
    assert losses[-1] < losses[0]


class Net(L.LightningModule):
    def __init__(self, optimizer):
        super().__init__()
        self.layer, self.optimizer = torch.nn.Linear(4, 2), optimizer

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw_then_trainer_needed(parameters):
    raise RuntimeError("the Trainer is not there yet")


def test_a_callback_without_effect_is_refused_before_any_process_starts(monkeypatch):
    def start(*args):
        raise AssertionError("a process was started")

    monkeypatch.setattr(SubprocessLauncher, "_call_children_scripts", start)
    options = {"strategy": "ddp_dense", "callbacks": [lgc.SparsityWarmup()], **QUIET}
    trainer = L.Trainer(accelerator="cpu", devices=2, max_epochs=1, **options)
    with pytest.raises(ValueError, match="SparsityWarmup: got 'NoCompression'"):
        trainer.fit(Net(sgd), torch.zeros(4, 4))


def test_optimizers_are_not_made_before_processes_start(monkeypatch):
    """`configure_optimizers` may need the Trainer, and is called once."""

    class Started(Exception):
        pass

    def start(*args):
        raise Started

    monkeypatch.setattr(SubprocessLauncher, "_call_children_scripts", start)
    trainer = L.Trainer(strategy="DGC", accelerator="cpu", devices=2, **QUIET)  # Lightning takes names in any case
    with pytest.raises(Started):
        trainer.fit(Net(adamw_then_trainer_needed), torch.zeros(4, 4))


@pytest.mark.parametrize("cls", [lgc.CompressedDDPStrategy, lgc.CompressedFabricStrategy])
@pytest.mark.parametrize("option", AVERAGING_OPTIONS)
def test_options_that_say_how_to_average_are_refused(option, cls):
    with pytest.raises(ValueError, match=rf"{cls.__name__}\.{option}: got .*, allowed: None"):
        cls(**{option: 1})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: lgc.SparsityWarmup(periods=1.5),
            r"SparsityWarmup.periods: got 1.5, allowed: a whole number from 0",
        ),
        (lambda: lgc.SparsityWarmup(dense=0.5), r"SparsityWarmup.dense: got 0.5, allowed: a whole number from 0"),
        (lambda: lgc.DelayedStrategy(outer=0.7), r"DelayedStrategy.outer: got 0.7, allowed: None, or .*Nesterov\("),
    ],
)
def test_types_of_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("cls", [lgc.CompressedDDPStrategy, lgc.CompressedFabricStrategy])
def test_unknown_names_are_answered_with_the_known(cls):
    with pytest.raises(ValueError, match=r"compressor: got 'lzma', allowed: .*dgc.*none"):
        cls(compressor="lzma")
    with pytest.raises(ValueError, match=r"topology: got 'ring', allowed: 'auto', 'all_gather'"):
        cls(topology="ring")


def test_the_monitor_wants_one_of_our_strategies():
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[lgc.CommunicationMonitor()], **QUIET)
    with pytest.raises(ValueError, match=r"CommunicationMonitor: got 'SingleDeviceStrategy', .*ddp_dense"):
        trainer.fit(Net(sgd), torch.zeros(4, 4))


def test_every_compressor_is_a_strategy_name():
    names = {entry.strategy for entry in lgc.entries()}
    assert {"dgc", "ddp_dense"} <= names
    assert names <= set(StrategyRegistry) and names <= set(STRATEGY_REGISTRY)


def test_one_device_trains_as_without_compression(capsys, caplog):
    def trained(strategy):
        L.seed_everything(0, verbose=False)
        net = Net(sgd)
        trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=3, **QUIET)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(net, torch.arange(64.0).view(16, 4) / 64)
        return trainer, net.layer.weight.detach().clone()

    with caplog.at_level("INFO", logger="lightning.pytorch"):
        trainer, compressed = trained("dgc")
    _, plain = trained("auto")
    assert torch.equal(compressed, plain)
    assert trainer.strategy.averager.stats.bytes_sent == 0
    assert "nothing is exchanged" in caplog.text
    torch.distributed.destroy_process_group()
