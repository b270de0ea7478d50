"""strategy="dga" in Lightning, on two ranks. One run of delayed_script.py serves most tests."""

import json
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch

import lightning_gradcomp as lgc
from tests.processes import run_world

FOLDER = Path(__file__).parent
METHODS = ["none", "dgc", "gather", "sidecar", "several", "averaged"]
"""The last four: gradient dropping with an error_decay, by what becomes of what ranks remember, with two optimizers,
and with moving averages."""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    script = str(FOLDER / "delayed_script.py")
    return json.loads(run_world(2, script, str(tmp_path_factory.mktemp("delayed")), timeout=120).splitlines()[-1])


@pytest.mark.parametrize("method", METHODS)
def test_ranks_are_equal_whenever_weights_are_read(outcome, method):
    seen = outcome[method]
    assert max(seen["batch"]) > 1e-4
    assert len(seen["validation"]) == len(seen["epoch"]) == 2
    assert set(seen["validation"]) == set(seen["epoch"]) == {0}
    assert seen["end"] == 0
    assert sum(seen["losses"][2:]) < sum(seen["losses"][:2])  # of the same batches


@pytest.mark.parametrize("method", METHODS)
def test_resuming_in_mid_round_is_exact(outcome, method):
    assert outcome[method]["saved"]
    assert outcome[method]["differs"] == 0


def test_a_callbacks_moving_average_is_the_same_on_all_ranks_and_resumes(outcome):
    assert outcome["averaged"]["averages"] == [0, 0, 0]


def test_the_statistics_of_averaged_weights_are_the_same_on_all_ranks(outcome):
    """StochasticWeightAveraging gathers them in an epoch without steps."""
    assert outcome["swa"] == 0


def test_a_step_of_a_round_is_a_batch_in_which_an_optimizer_steps(outcome):
    assert (outcome["none"]["steps"], outcome["several"]["steps"]) == (20, 18)


def test_a_compiled_network_trains_as_without(outcome):
    assert outcome["compiled"] <= 1e-6


def test_the_monitor_shows_what_rounds_cost(outcome):
    summary, logged = outcome["monitor"]["summary"], outcome["monitor"]["logged"]
    assert {"comm/bytes_sent", "comm/ratio_N2", "time/exchange_ms"} <= set(logged)
    assert {"dga/overlapped_steps", "dga/late_rounds", "dga/consensus_distance"} <= set(logged)
    rounds = summary["rounds"]
    assert (rounds["period"], rounds["delay"], rounds["rounds"]) == (8, 8, 2)
    assert summary["steps"] == 20
    assert 0 < summary["bytes_sent"] < summary["dense_bytes"] / 2
    assert summary["totals"]["bytes_sent"] == rounds["bytes_sent"] == summary["bytes_sent"]
    assert "memory/residual_to_gradient" not in logged
    assert rounds["consensus_distance"] > 0 and rounds["stall_seconds"] > 0


def test_waiting_in_a_training_step_is_told_once(outcome):
    [told] = outcome["monitor"]["waits"]
    assert "sync_dist=True" in told and "ms this time" in told


@pytest.mark.parametrize("place", ["training_step", "on_before_backward"])
def test_a_checkpoint_between_forward_and_backward_is_refused(outcome, place):
    assert "Refused: checkpoint with DelayedStrategy: got 'one between forward and backward'" in outcome["saves"][place]


def test_a_checkpoint_between_the_steps_of_several_optimizers_is_refused(outcome):
    assert "checkpoint with DelayedStrategy: got 'one inside training_step'" in outcome["saves"]["manual"]


@pytest.mark.parametrize("place", ["on_before_optimizer_step", "on_train_batch_end"])
def test_a_checkpoint_after_backward_is_saved(outcome, place):
    assert outcome["saves"][place] is None


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "TorchsOptimizer",
            'optimizer with DelayedStrategy: got "torch\'s own SGD", allowed: one from self.optimizers',
        ),
        (
            "TorchsOptimizers",
            'optimizer with DelayedStrategy: got "torch\'s own SGD", allowed: one from self.optimizers',
        ),
        (
            "NoOptimizer",
            "configure_optimizers with DelayedStrategy: got 'no optimizer of the model'",
        ),
        ("dist_async", 'optimizer with AsyncStrategy: got "torch\'s own SGD", allowed: one from self.optimizers'),
    ],
)
def test_steps_that_would_not_be_averaged_are_refused(outcome, how, message):
    assert message in outcome["unseen steps"][how]


def test_sparseloco_is_a_name_of_the_trainer():
    strategy = L.Trainer(strategy="sparseloco", accelerator="cpu", devices=2, logger=False).strategy
    assert isinstance(strategy, lgc.DelayedStrategy)
    rule = strategy.rule
    assert (rule["period"], rule["delay"], rule["error_decay"]) == (15, 0, 0.95)
    assert strategy.compressor == lgc.SPARSELOCO["compressor"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"find_unused_parameters": True}, "got 'find_unused_parameters', allowed: no DDP options"),
        ({"model_averaging_period": 4}, "got 'model_averaging_period', allowed: no DDP options"),
        ({"delay": 9}, "delay: got 9, allowed: 0 to 8"),
        ({"period": 0}, "period: got 0"),
        ({"compressor": "lzma"}, "got 'lzma', allowed: .*powersgd"),
        ({"error_decay": 2}, "error_decay: got 2, allowed: None, or a number from 0 to 1"),
        ({"checkpoint_state": "all"}, "checkpoint_state: got 'all', allowed: 'auto', 'gather', 'sidecar'"),
        ({"checkpoint_state": "mean"}, "checkpoint_state: got 'mean', allowed: 'auto': without error_decay"),
    ],
    ids=str,
)
def test_options_that_can_not_be_honoured_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        lgc.DelayedStrategy(**options)


class Two(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync_batchnorm": True}, "sync_batchnorm with DelayedStrategy: got True"),
        ({"callbacks": [lgc.SparsityWarmup()]}, "SparsityWarmup: got 'DelayedStrategy'"),
    ],
    ids=["sync_batchnorm", "SparsityWarmup"],
)
def test_refused_before_processes_start(options, message, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    strategy = lgc.DelayedStrategy("dgc")
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, **options)
    with pytest.raises(ValueError, match=message):
        trainer.fit(Two(), torch.utils.data.DataLoader(range(2)))


class Accumulates(L.LightningModule):
    """Two backward passes in a step, the first inside DDP's `no_sync`."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        with self.trainer.model.no_sync():
            self.manual_backward(self.layer(batch).square().mean())
        self.manual_backward(self.layer(batch).mean())
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_no_sync_of_ddp_has_nothing_to_do():
    def trained(strategy):
        L.seed_everything(0, verbose=False)
        net = Accumulates()
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(net, torch.ones(4, 4))
        assert not hasattr(net, "no_sync")
        return net.layer.weight.detach()

    assert torch.equal(trained("dga"), trained("ddp"))
    torch.distributed.destroy_process_group()
