"""Ranks as threads that train a small model with a DelayedAverager."""

import threading

import torch

from lightning_gradcomp import DelayedAverager
from tests import threads
from tests.averaging.workers import HAS_MUON, Table, backward, bowl_loss, muon_adamw

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}
if HAS_MUON:
    OPTIMIZERS["muon"] = muon_adamw
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


def join_exchanges():
    """Wait for the exchanges of all ranks that are running in background threads."""
    for thread in threading.enumerate():
        if thread.name == "exchange" and thread.is_alive():  # not one that another rank is about to start
            thread.join(10)


def run_ranks(world, work):
    """As `threads.run_ranks`; no exchange is running in the groups afterwards, which the next ranks use again."""
    results = threads.run_ranks(world, work)
    join_exchanges()
    return results


def set_up(group, optimizer="momentum", model=Table, **options):
    """A model, its optimizer and its averager."""
    model = model()
    made = OPTIMIZERS[optimizer](model.parameters())
    return model, made, DelayedAverager(model, made, process_group=group, **options)


def train(model, optimizer, averager, rank, steps, loss=bowl_loss):
    """The given range of steps, or as many from step 0."""
    for step in steps if isinstance(steps, range) else range(steps):
        backward(model, optimizer, rank, step, loss)
        averager.step()
