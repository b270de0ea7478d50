"""dist_async in Lightning: two ranks with a server each, and one rank alone, which is plain SGD."""

import copy
import math
import os
import signal
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
from features_kit import RANK, on_every_rank, spread
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import SIGTERMException
from moving_average import Averaging
from torch import nn

import lightning_gradcomp as lgc
from lightning_gradcomp.app.compose import SaveLast
from lightning_gradcomp.plugin.async_strategy import _own_address
from tests.processes import on_ranks

pytestmark = pytest.mark.filterwarnings(
    "ignore:The dirpath has changed", "ignore:.*callbacks used to create", "ignore:Checkpoint dir"
)
SMALL = {"sparsity": 0.9, "min_elements": 32}
COMPRESSED = {"compressor": lgc.DGC(**SMALL), "pull": "int8"}


class Net(L.LightningModule):
    """A small classifier with batch norm, a frozen weight and a buffer, whose learning rate falls."""

    lr = 0.05

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(1 + torch.rand(1) / 100, requires_grad=False)
        self.register_buffer("shift", torch.rand(1) / 100)
        layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)]
        self.layers, self.losses = nn.Sequential(*layers), []

    def loss(self, batch):
        return nn.functional.cross_entropy(self.layers(batch[0] * self.scale + self.shift), batch[1])

    def training_step(self, batch, index):
        return self.loss(batch)

    def validation_step(self, batch, index):
        self.log("loss", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self):
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


class Unequal(Net):
    """Rank 1 waits in its first batch until rank 0 has come to the last of the epoch. Has a teacher."""

    last: Path

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, *args):
        for mean, new in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
            mean.lerp_(new, 0.1)

    def training_step(self, batch, index):
        if self.global_rank == 0 and index == 3:
            self.last.touch()
        while self.global_rank == 1 and not self.last.exists():
            time.sleep(0.01)
        return self.loss(batch)


class Terminated(Net):
    """Rank 1 receives a SIGTERM in its second batch."""

    def training_step(self, batch, index):
        if self.global_rank == 1 and index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.loss(batch)


def batches():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(128, 1, 8, 8, generator=generator)
    labels = (images.mean((1, 2, 3)) * 30 + 5).long().clamp(0, 9)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), 16)


def fit(strategy, epochs, folder, devices, ckpt=None, model=None, callbacks=(), **options):
    """The trainer and the model after a fit that saves a checkpoint in each epoch."""
    model, saving = model or Net(), ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    monitor = [lgc.CommunicationMonitor()] if isinstance(strategy, lgc.AsyncStrategy) else []
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, max_epochs=epochs, num_sanity_val_steps=0, logger=False,
        callbacks=[saving, *monitor, *callbacks], enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(model, batches(), batches(), ckpt_path=ckpt)
    trainer.save_checkpoint(folder / "end.ckpt")
    return trainer, model


def weights(model):
    return torch.cat([tensor.float().reshape(-1) for tensor in model.state_dict().values()])


def end():
    dist.destroy_process_group()


# Two ranks


@cache
def trained(name, folder):
    """(module, ratio) after three epochs, which leave checkpoints in `folder`."""
    options = {"model": Net(RANK), "gradient_clip_val": 1.0} if name == "none" else {}
    strategy = lgc.AsyncStrategy() if name == "none" else lgc.AsyncStrategy(**COMPRESSED, staleness=1)
    trainer, model = fit(strategy, 3, folder / name, 2, **options)
    [summary] = [each.summary() for each in trainer.callbacks if isinstance(each, lgc.CommunicationMonitor)]
    dist.barrier()
    assert sum(summary["async"]["staleness"].values()) == trainer.global_step == 12
    return model, summary["ratio"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("async")


@pytest.mark.parametrize("name", ["none", "dgc"])
@on_ranks(2)
def test_two_ranks_learn_and_end_with_the_same_weights(name, folder):
    model, _ = trained(name, folder)
    assert model.losses[-1] < 0.9 * model.losses[0]
    assert spread(weights(model)) == 0


@on_ranks(2)
def test_compressed_pulls_raise_the_ratio(folder):
    assert trained("none", folder)[1] < 1 < 2 < trained("dgc", folder)[1]


@on_ranks(2)
def test_a_rank_does_not_wait_for_a_slow_one(tmp_path):
    """A callback's moving average is the same on both nevertheless."""
    Unequal.last, averaging = tmp_path / "last batch", Averaging()
    strategy = lgc.AsyncStrategy(staleness=math.inf)
    trainer, model = fit(strategy, 1, tmp_path, 2, model=Unequal(), callbacks=[averaging])
    assert trainer.global_step == 4 and spread(weights(model)) == averaging.differs == 0


@on_ranks(2)
def test_sigterm_on_one_rank_ends_all_together(tmp_path):
    model, path = Terminated(), tmp_path / "term.ckpt"
    with suppress(SIGTERMException):
        fit(lgc.AsyncStrategy("dgc"), 3, tmp_path, 2, model=model, callbacks=[SaveLast(path)])
    steps = on_every_rank(model.trainer.global_step)
    saved = torch.load(path, weights_only=True)
    remembered = [rank["steps"] for rank in saved["lightning_gradcomp_async"]["lightning_gradcomp"]["ranks"]]
    assert steps == remembered == 2 * [saved["global_step"]] and saved["global_step"] < 12


@on_ranks(2)
def test_two_ranks_go_on_from_a_checkpoint(folder, tmp_path):
    before, _ = trained("dgc", folder)
    trainer, model = fit(lgc.AsyncStrategy(**COMPRESSED), 4, tmp_path, 2, ckpt=folder / "dgc" / "end.ckpt")
    assert trainer.global_step == 16
    assert model.losses[-1] < before.losses[-1] + 0.2


@on_ranks(2)
def test_a_validation_after_a_fit_does_not_cost_the_state(tmp_path):
    trainer, model = fit(lgc.AsyncStrategy(**COMPRESSED), 1, tmp_path, 2)
    trainer.validate(model, batches(), verbose=False)
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    before, after = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("end", "again"))
    torch.testing.assert_close(after["optimizer_states"], before["optimizer_states"], rtol=0, atol=0)
    ranks, again = (saved["lightning_gradcomp_async"]["lightning_gradcomp"]["ranks"] for saved in (before, after))
    torch.testing.assert_close([rank["memory"] for rank in again], [rank["memory"] for rank in ranks], rtol=0, atol=0)


@on_ranks(2)
def train_all(folder):
    for name in ("none", "dgc"):
        trained(name, folder)


@pytest.fixture(scope="module")
def checkpoints(folder):
    """The last ones of two ranks."""
    train_all(folder=folder)
    return {name: folder / name / "epoch=2.ckpt" for name in ("none", "dgc")}


def test_a_checkpoint_goes_on_in_plain_ddp(checkpoints, tmp_path):
    saved = torch.load(checkpoints["none"], weights_only=True)
    momentum = [state["momentum_buffer"] for state in saved["optimizer_states"][0]["state"].values()]
    assert len(momentum) == 6 and all(buffer.any() for buffer in momentum)
    trainer, _ = fit("auto", 4, tmp_path, 1, ckpt=checkpoints["none"])
    assert trainer.current_epoch == 4


def test_a_checkpoint_goes_on_with_another_number_of_ranks(checkpoints, tmp_path):
    trainer, _ = fit(lgc.AsyncStrategy(lgc.DGC(**SMALL)), 4, tmp_path, 1, ckpt=checkpoints["dgc"])
    end()
    assert trainer.current_epoch == 4


# One rank


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
    "clipping": (
        {"compressor": lgc.DGC(clip_norm=1.0)},
        {},
        "DGC.clip_norm with dist_async: got 1.0, allowed: None",
    ),
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


@pytest.mark.parametrize("bound", [-1, 1.5, True, "4"])
def test_a_bound_that_is_none_is_refused(bound):
    with pytest.raises(ValueError, match=f"^staleness: got {bound!r}, allowed: .*a whole number from 0"):
        lgc.AsyncStrategy(staleness=bound)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_node_s_address_is_of_the_interface_that_reaches_the_main_one(address, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", address)
    try:
        assert _own_address(nodes=2) == address
    except OSError:
        pytest.skip(f"{address} is not an address of this machine")
