"""Runs on both ranks: saves that not every rank makes alike, and SIGTERM on one rank, also where no step follows.

usage: saves_and_sigterm.py FOLDER. Rank 0 prints one JSON line: part -> case -> what each rank saw.
"""

import json
import logging
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from strategies import forced

import lightning_gradcomp as lgc
from lightning_gradcomp.plugin import base_strategy

FOLDER, RANK = Path(sys.argv[1]), int(os.environ["RANK"])
PATIENCE = timedelta(seconds=90)
BATCHES = 3
STRATEGIES = {
    "ddp": lambda: DDPStrategy(timeout=PATIENCE),
    "none": lambda: forced("none", timeout=PATIENCE),
    "dgc": lambda: forced(lgc.DGC(sparsity=0.5, warmup_epochs=0, dense_epochs=0, min_elements=1), timeout=PATIENCE),
    "dga": lambda: lgc.DelayedStrategy(period=2, delay=1, timeout=PATIENCE),
    "sparseloco": lambda: lgc.DelayedStrategy(**{**lgc.SPARSELOCO, "period": 2}, timeout=PATIENCE),
}


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


class Watch(L.Callback):
    ended = False

    def on_train_end(self, *_):
        self.ended = True


def fit(strategy, callback, net=None, ckpt=None):
    """Two epochs, each with a validation; returns what happened on this rank."""
    L.seed_everything(0, verbose=False)
    watch = Watch()
    trainer = L.Trainer(
        strategy=STRATEGIES[strategy](), accelerator="cpu", devices=2, max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[callback, watch],
        num_sanity_val_steps=0, use_distributed_sampler=False,
    )  # fmt: skip
    begin, error = time.monotonic(), None
    data = torch.utils.data.DataLoader(torch.ones(BATCHES, 8))
    try:
        trainer.fit(net or Net(), data, data, ckpt_path=ckpt)
    except (Exception, SIGTERMException) as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"error": error, "steps": trainer.global_step, "ended": watch.ended, "seconds": time.monotonic() - begin}


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


class Drops(Net):
    """One rank's hook removes the optimizers from its checkpoint."""

    def __init__(self, rank):
        super().__init__()
        self.drops = rank

    def on_save_checkpoint(self, checkpoint):
        if self.drops == RANK:
            del checkpoint["optimizer_states"]


def saves():
    outcome = {}
    for strategy in ("dgc", "dga", "sparseloco"):
        path = f"{FOLDER}/{strategy}-{{}}.ckpt".format
        outcome[f"{strategy} everyone"] = fit(strategy, Save(path("everyone"), "together"))
        dump = Dump(path("dump"), "alone")
        outcome[f"{strategy} dump"] = {**fit(strategy, dump), "said": dump.said}
        dist.barrier()
        outcome[f"{strategy} resumed"] = fit(strategy, Watch(), ckpt=path("dump"))
        for rank in (0, 1):
            outcome[f"{strategy} {rank} drops"] = fit(strategy, Save(path(f"drops-{rank}"), "together"), Drops(rank))
        outcome[f"{strategy} alone"] = fit(strategy, Save(path("alone"), "alone"))
    return outcome


class Late(Save):
    """Rank 1 is late, so rank 0 waits for longer than it does without a word."""

    def on_train_epoch_end(self, trainer, module):
        time.sleep(0.5 * (RANK == 1))
        super().on_train_epoch_end(trainer, module)


def waits():
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    base_strategy.log.addHandler(handler)
    with mock.patch.object(base_strategy, "WAITING_SECONDS", 0.1):
        return {"dgc": {**fit("dgc", Late(f"{FOLDER}/late.ckpt", "together")), "said": said}}


MOMENTS = {"early": (0, "step", 0), "step": (1, "step", BATCHES - 1), "validation": (1, "validation", BATCHES - 1)}
"""Epoch, what is under way, and its batch."""


class Terminate(L.Callback):
    """SIGTERM at a moment, on rank 1 alone, but under ddp on both. Every rank saves a checkpoint on its way out."""

    def __init__(self, strategy, moment):
        self.strategy, self.moment, self.here = strategy, moment, strategy == "ddp" or RANK == 1

    def send(self, trainer, place, index):
        if self.here and (trainer.current_epoch, place, index) == MOMENTS[self.moment]:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_exception(self, trainer, module, error):
        if self.moment == "early":
            trainer.save_checkpoint(f"{FOLDER}/{self.strategy}-terminated.ckpt")

    def on_before_zero_grad(self, trainer, *_):
        self.send(trainer, "step", trainer.fit_loop.epoch_loop.batch_idx)

    def on_validation_batch_end(self, trainer, module, outputs, batch, index):
        self.send(trainer, "validation", index)


def signals():
    return {
        f"{strategy} {moment}": fit(strategy, Terminate(strategy, moment))
        for strategy in ("ddp", "none", "dgc", "dga")
        for moment in MOMENTS
        if (strategy, moment) != ("ddp", "early")
    }


class SaveOnException(L.Callback):
    """Notes whether rank 0's file is there once the save returns."""

    there = None

    def on_exception(self, trainer, module, error):
        trainer.save_checkpoint(f"{FOLDER}/exception.ckpt")
        self.there = os.path.exists(f"{FOLDER}/exception.ckpt")


class Raises(Net):
    """An error on both ranks, and a rank 0 that takes its time to save."""

    def training_step(self, batch, index):
        raise ArithmeticError("on every rank")

    def on_save_checkpoint(self, checkpoint):
        time.sleep(0.5 * (RANK == 0))


def errors():
    saving = SaveOnException()
    return {"dgc": {**fit("dgc", saving, Raises()), "there": saving.there}}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    own, everyones = {part.__name__: part() for part in (saves, waits, signals, errors)}, [None, None]
    dist.all_gather_object(everyones, own)
    if RANK == 0:
        print(
            json.dumps({part: {case: [rank[part][case] for rank in everyones] for case in own[part]} for part in own})
        )
