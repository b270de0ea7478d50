"""dist_async in Lightning: two ranks with a server each, and one rank alone, which is plain SGD."""

import json
import time
from datetime import timedelta
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, StochasticWeightAveraging

import lightning_gradcomp as lgc
from lightning_gradcomp.plugin.async_strategy import _own_address
from tests.plugin.async_script import SMALL, Net, batches, fit
from tests.processes import run_world

pytestmark = pytest.mark.filterwarnings(
    "ignore:The dirpath has changed", "ignore:.*callbacks used to create", "ignore:Checkpoint dir"
)
SCRIPT = str(Path(__file__).with_name("async_script.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("async")


@pytest.fixture(scope="module")
def outcome(folder):
    return json.loads(run_world(2, SCRIPT, str(folder), timeout=120).splitlines()[-1])


@pytest.mark.parametrize("name", ["none", "dgc"])
def test_two_ranks_learn_and_end_with_the_same_weights(outcome, name):
    found = outcome[name]
    assert found["losses"][-1] < 0.9 * found["losses"][0]
    assert found["spread"] == 0
    assert found["steps"] == found["pushes"] == 12


def test_compressed_pulls_raise_the_ratio(outcome):
    assert outcome["none"]["ratio"] < 1 < 2 < outcome["dgc"]["ratio"]


def test_a_rank_does_not_wait_for_a_slow_one(outcome):
    assert outcome["free"]["steps"] == 4 and outcome["free"]["spread"] == 0


def test_a_callbacks_moving_average_is_the_same_on_all_ranks(outcome):
    assert outcome["free"]["averages"] == 0


def test_sigterm_on_one_rank_ends_all_together(outcome):
    found = outcome["terminated"]
    assert found["steps"] == found["remembered"] == 2 * [found["saved"]] and found["saved"] < 12


def test_two_ranks_go_on_from_a_checkpoint(outcome):
    assert outcome["resumed"]["steps"] == 16
    assert outcome["resumed"]["losses"][-1] < outcome["dgc"]["losses"][-1] + 0.2


def test_a_validation_after_a_fit_does_not_cost_the_state(outcome, folder):
    before, after = (torch.load(folder / "validated" / f"{name}.ckpt", weights_only=True) for name in ("end", "again"))
    torch.testing.assert_close(after["optimizer_states"], before["optimizer_states"], rtol=0, atol=0)
    ranks, again = (saved["lightning_gradcomp_async"]["lightning_gradcomp"]["ranks"] for saved in (before, after))
    torch.testing.assert_close([rank["memory"] for rank in again], [rank["memory"] for rank in ranks], rtol=0, atol=0)


def test_a_checkpoint_goes_on_in_plain_ddp(outcome, folder, tmp_path):
    saved = torch.load(folder / "none" / "epoch=2.ckpt", weights_only=True)
    momentum = [state["momentum_buffer"] for state in saved["optimizer_states"][0]["state"].values()]
    assert len(momentum) == 6 and all(buffer.any() for buffer in momentum)
    trainer, _ = fit("auto", 4, tmp_path, 1, ckpt=folder / "none" / "epoch=2.ckpt")
    assert trainer.current_epoch == 4


def test_a_checkpoint_goes_on_with_another_number_of_ranks(outcome, folder, tmp_path):
    path = folder / "dgc" / "epoch=2.ckpt"
    trainer, _ = fit(lgc.AsyncStrategy(lgc.DGC(**SMALL)), 4, tmp_path, 1, ckpt=path)
    end()
    assert trainer.current_epoch == 4


def weights(model):
    return torch.cat([tensor.float().reshape(-1) for tensor in model.state_dict().values()])


def end():
    torch.distributed.destroy_process_group()


def test_one_rank_is_sgd_to_the_bit(tmp_path):
    found, options = [], {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    for strategy in ("ddp", lgc.AsyncStrategy()):
        found.append(weights(fit(strategy, 2, tmp_path, 1, **options)[1]))
        end()
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LearningRateFinder(min_lr=0.1, max_lr=0.5, num_training_steps=5, update_attr=False),
        lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1),
    ],
    ids=["LearningRateFinder", "StochasticWeightAveraging"],
)
def test_weights_that_a_callback_sets_stay(tmp_path, make, monkeypatch):
    """Before training goes on, and after it has ended."""
    monkeypatch.chdir(tmp_path)
    found = []
    for strategy in ("ddp", lgc.AsyncStrategy()):
        model = Net()
        model.layers[1] = torch.nn.Identity()
        found.append(weights(fit(strategy, 3, tmp_path, 1, model=model, callbacks=[make()])[1]))
        end()
    assert torch.equal(*found)


def test_a_validation_may_be_longer_than_the_timeout(tmp_path):
    class Slow(Net):
        def setup(self, stage):
            self.trainer.strategy._timeout = timedelta(seconds=1)

        def on_validation_epoch_end(self):
            time.sleep(1.2)

    trainer, _ = fit(lgc.AsyncStrategy(), 2, tmp_path, 1, model=Slow())
    end()
    assert trainer.global_step == 16


@pytest.mark.parametrize("make", [lambda: "none", lambda: lgc.DGC(**SMALL)], ids=["none", "dgc"])
def test_a_run_that_goes_on_is_the_straight_one(tmp_path, make):
    _, straight = fit(lgc.AsyncStrategy(make()), 3, tmp_path / "straight", 1)
    end()
    _, resumed = fit(lgc.AsyncStrategy(make()), 3, tmp_path / "on", 1, ckpt=tmp_path / "straight" / "epoch=0.ckpt")
    end()
    assert torch.equal(weights(resumed), weights(straight))


REFUSED = {
    "PowerSGD": (
        {"compressor": "powersgd"},
        {},
        "compressor with dist_async: got 'PowerSGD', allowed: a compressor whose payloads a server can decode: DGC, ",
    ),
    "a start": ({"compressor": lgc.DGC(start_sparsity=0.9)}, {}, "DGC.start_sparsity with dist_async: got 0.9, a"),
    "a warm-up": ({"compressor": lgc.DGC(warmup_epochs=2)}, {}, "DGC.warmup_epochs with dist_async: got 2, allowed: 0"),
    "dense steps": ({"compressor": lgc.OneBit(warmup_steps=5)}, {}, "OneBit.warmup_steps with dist_async: got 5, a"),
    "SparsityWarmup": (
        {"compressor": "dgc"},
        {"callbacks": [lgc.SparsityWarmup()]},
        "SparsityWarmup: got 'AsyncStrategy'",
    ),
    "sync_batchnorm": ({}, {"sync_batchnorm": True}, "sync_batchnorm with AsyncStrategy: got True"),
}


@pytest.mark.parametrize(("options", "run", "told"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_honoured_is_refused(options, run, told):
    trainer = L.Trainer(strategy=lgc.AsyncStrategy(**options), accelerator="cpu", devices=2, logger=False, **run)
    with pytest.raises(ValueError, match=told):
        trainer.fit(Net(), batches())


def test_momentum_in_adam_is_refused_before_the_first_step(tmp_path):
    class Other(Net):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    with pytest.raises(ValueError, match="DGC with dist_async: got 'AdamW', allowed: SGD; with Adam"):
        fit(lgc.AsyncStrategy("dgc"), 1, tmp_path, 1, model=Other())
    end()


@pytest.mark.parametrize(
    ("name", "bound"),
    [("staleness", -1), ("staleness", 1.5), ("staleness", True), ("staleness", "4")],
)
def test_a_bound_that_is_none_is_refused(name, bound):
    with pytest.raises(ValueError, match=f"^{name}: got {bound!r}, allowed: .*a whole number from 0"):
        lgc.AsyncStrategy(**{name: bound})


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_node_s_address_is_of_the_interface_that_reaches_the_main_one(address, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", address)
    try:
        assert _own_address(nodes=2) == address
    except OSError:
        pytest.skip(f"{address} is not an address of this machine")
