"""Saves that not every rank makes alike, and SIGTERM on one rank, also where no step follows."""

import logging
import os
import signal
import time
import warnings
from datetime import timedelta
from unittest import mock

import lightning as L
import pytest
import torch
from features_kit import QUIET, RANK, on_every_rank
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from strategies import forced

import lightning_gradcomp as lgc
from lightning_gradcomp.plugin import base_strategy
from lightning_gradcomp.plugin.delayed import KEY as DELAYED
from lightning_gradcomp.plugin.rank_states import KEY
from tests.processes import on_ranks

PATIENCE = timedelta(seconds=90)
BATCHES = 3
STRATEGIES = {
    "ddp": lambda: DDPStrategy(timeout=PATIENCE),
    "none": lambda: forced("none", timeout=PATIENCE),
    "dgc": lambda: forced(lgc.DGC(sparsity=0.5, warmup_epochs=0, dense_epochs=0, min_elements=1), timeout=PATIENCE),
    "dga": lambda: lgc.DelayedStrategy(period=2, delay=1, timeout=PATIENCE),
    "sparseloco": lambda: lgc.DelayedStrategy(**{**lgc.SPARSELOCO, "period": 2}, timeout=PATIENCE),
}
with_states = pytest.mark.parametrize(("strategy", "key"), [("dgc", KEY), ("dga", DELAYED), ("sparseloco", DELAYED)])


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def training_step(self, batch, index):
        return self.layer(batch + self.global_rank).square().mean()

    def validation_step(self, batch, index):
        self.layer(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Run:
    """Two epochs, each with a validation.

    Args:
        strategy: one of `STRATEGIES`.
        callback: of the Trainer.
        net: what trains.
        ckpt: a checkpoint to go on from.
        raises: (class, pattern) of the error that ends it.
    """

    def __init__(self, strategy, callback=None, net=None, ckpt=None, raises=None):
        L.seed_everything(0, verbose=False)
        self.trainer = trainer = L.Trainer(
            strategy=STRATEGIES[strategy](), accelerator="cpu", devices=2, max_epochs=2, num_sanity_val_steps=0,
            callbacks=[callback] if callback else [], use_distributed_sampler=False, **QUIET,
        )  # fmt: skip
        data, begin = torch.utils.data.DataLoader(torch.ones(BATCHES, 8)), time.monotonic()
        if raises:
            with pytest.raises(raises[0], match=raises[1]):
                trainer.fit(net or Net(), data, data)
            assert time.monotonic() - begin < PATIENCE.total_seconds() / 3
        else:
            trainer.fit(net or Net(), data, data, ckpt_path=ckpt)
            assert trainer.global_step == 6 and trainer.state.finished


def load(path):
    return torch.load(path, weights_only=True)


# Saves


class Save(L.Callback):
    """Saves at the end of the first epoch."""

    def __init__(self, path, how):
        self.path, self.how = path, how

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 0 and (RANK == 0 or self.how != "alone"):
            trainer.save_checkpoint(self.path)


class Dump(Save):
    """Rank 0 calls the strategy itself, as it may under DDP."""

    said = ()

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 0 and RANK == 0:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                trainer.strategy.save_checkpoint(trainer._checkpoint_connector.dump_checkpoint(False), self.path)
            self.said = [str(warning.message) for warning in said]
            trainer.strategy.save_checkpoint(
                trainer._checkpoint_connector.dump_checkpoint(True), f"{self.path}.weights"
            )


@with_states
@on_ranks(2)
def test_rank_0_may_save_by_itself(strategy, key, tmp_path):
    """What every rank saves, and what rank 0 does without the others, can both be resumed from."""
    everyone, own = tmp_path / "everyone.ckpt", tmp_path / "own.ckpt"
    Run(strategy, Save(everyone, "together"))
    dump = Dump(own, "alone")
    Run(strategy, dump)
    on_every_rank(None)  # rank 0 has saved
    Run(strategy, ckpt=own)
    if strategy != "dgc":
        return
    whole, alone = load(everyone), load(own)
    assert all(torch.equal(alone["state_dict"][name], weight) for name, weight in whole["state_dict"].items())
    momentum = alone["optimizer_states"][0]["state"][0]["momentum_buffer"]
    held = [rank["memory"]["momentum"]["layer.weight"] for rank in whole[key]["ranks"]]
    assert key not in alone
    assert torch.equal(momentum, held[0]) and not torch.equal(momentum, held[1])
    if RANK == 0:
        [warning] = dump.said
        assert "lacks their residuals" in warning


@with_states
@on_ranks(2)
def test_a_save_on_some_ranks_alone_is_an_error_on_all(strategy, key, tmp_path):
    message = "trainer.save_checkpoint: got 'a call on only some ranks', allowed: a call on every"
    Run(strategy, Save(tmp_path / "alone.ckpt", "alone"), raises=(Exception, message))


class Drops(Net):
    """One rank's hook removes the optimizers from its checkpoint."""

    def __init__(self, rank):
        super().__init__()
        self.drops = rank

    def on_save_checkpoint(self, checkpoint):
        if self.drops == RANK:
            del checkpoint["optimizer_states"]


@with_states
@on_ranks(2)
def test_rank_0_decides_whether_states_are_saved(strategy, key, tmp_path):
    saved = []
    for rank in (0, 1):
        Run(strategy, Save(tmp_path / f"{rank}.ckpt", "together"), Drops(rank))
        saved.append(load(tmp_path / f"{rank}.ckpt"))
    without, whole = saved
    assert not {key, "optimizer_states"} & set(without)
    assert {key, "optimizer_states"} <= set(whole)
    states = whole[key] if strategy == "dgc" else whole[key].get(KEY, {})
    assert len(states.get("ranks", ())) == (0 if strategy == "dga" else 2)


class Late(Save):
    """Rank 1 is late, so rank 0 waits for longer than it does without a word."""

    def on_train_epoch_end(self, trainer, module):
        time.sleep(0.5 * (RANK == 1))
        super().on_train_epoch_end(trainer, module)


@on_ranks(2)
def test_a_save_that_waits_says_so(tmp_path):
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    base_strategy.log.addHandler(handler)
    with mock.patch.object(base_strategy, "WAITING_SECONDS", 0.1):
        Run("dgc", Late(tmp_path / "late.ckpt", "together"))
    base_strategy.log.removeHandler(handler)
    assert len(said) == (RANK == 0) and all("trainer.save_checkpoint waits for other ranks" in each for each in said)


# SIGTERM


MOMENTS = {"early": (0, "step", 0), "step": (1, "step", BATCHES - 1), "validation": (1, "validation", BATCHES - 1)}
"""Epoch, what is under way, and its batch."""


class Terminate(L.Callback):
    """SIGTERM at a moment, on rank 1 alone, but under ddp on both."""

    def __init__(self, strategy, moment, path):
        self.moment, self.path, self.here = moment, path, strategy == "ddp" or RANK == 1

    def send(self, trainer, place, index):
        if self.here and (trainer.current_epoch, place, index) == MOMENTS[self.moment]:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_exception(self, trainer, module, error):
        if self.moment == "early":
            trainer.save_checkpoint(self.path)

    def on_before_zero_grad(self, trainer, *_):
        self.send(trainer, "step", trainer.fit_loop.epoch_loop.batch_idx)

    def on_validation_batch_end(self, trainer, module, outputs, batch, index):
        self.send(trainer, "validation", index)


def terminated(strategy, moment, path=None):
    """The steps of a run that SIGTERM ends."""
    run = Run(strategy, Terminate(strategy, moment, path), raises=(SIGTERMException, "^$"))
    return run.trainer.global_step


@pytest.mark.parametrize("strategy", ["ddp", "none", "dgc", "dga"])
@pytest.mark.parametrize("moment", ["step", "validation"])
@on_ranks(2)
def test_sigterm_at_the_end_is_what_it_is_under_ddp(strategy, moment):
    assert terminated(strategy, moment) == 6


@pytest.mark.parametrize(("strategy", "key"), [("none", KEY), ("dgc", KEY), ("dga", DELAYED)])
@on_ranks(2)
def test_sigterm_on_one_rank_ends_all_together_with_a_whole_checkpoint(strategy, key, tmp_path):
    first, second = on_every_rank(terminated(strategy, "early", tmp_path / "terminated.ckpt"))
    assert 1 <= first == second <= 3  # of 6
    saved = load(tmp_path / "terminated.ckpt")
    assert key in saved and saved["global_step"] == first


# Errors


class SaveOnException(L.Callback):
    """Rank 0's file is there once the save returns."""

    def __init__(self, path):
        self.path, self.there = path, False

    def on_exception(self, trainer, module, error):
        trainer.save_checkpoint(self.path)
        self.there = self.path.exists()


class Raises(Net):
    """An error on both ranks, and a rank 0 that takes its time to save."""

    def training_step(self, batch, index):
        raise ArithmeticError("on every rank")

    def on_save_checkpoint(self, checkpoint):
        time.sleep(0.5 * (RANK == 0))


@on_ranks(2)
def test_a_save_after_an_error_on_every_rank_waits_for_rank_0(tmp_path):
    saving = SaveOnException(tmp_path / "exception.ckpt")
    Run("dgc", saving, Raises(), raises=(ArithmeticError, "on every rank"))
    assert saving.there
