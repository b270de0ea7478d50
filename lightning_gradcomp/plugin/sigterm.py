"""SIGTERM, as clusters send it before they take a machine away: every rank ends after the same step.

Lightning 2.6 broadcasts from inside the signal handler, where it meets another rank's exchange of gradients, and both
wait until the timeout; it also broadcasts from rank 0 before every batch, one round trip each. Here the handler only
sets a flag. A compressed step, or a delayed round, sends it with its message; before a dense step it is all-reduced;
a push has it for the servers, whose answers say after which step all stop.

Private Lightning names used here: the Trainer's `_signal_connector` with its `_sigterm_notifier_fn` and
`received_sigterm`, and the epoch loop's `_broadcast_sigterm_tensor`.
"""

from __future__ import annotations

import logging
from types import FrameType

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_gradcomp.averaging import GradientAverager
from lightning_gradcomp.local_sgd.averager import DelayedAverager
from lightning_gradcomp.parameter_server.averager import AsyncAverager

log = logging.getLogger(__name__)
Averager = GradientAverager | DelayedAverager | AsyncAverager
HANDLER, BROADCAST = "_sigterm_notifier_fn", "_broadcast_sigterm_tensor"


def set_handler(trainer: Trainer, averager: Averager) -> None:
    """Set `averager.flag` at SIGTERM. Call it before Lightning registers its handlers."""
    connector = trainer._signal_connector

    def note(signum: int, frame: FrameType | None) -> None:
        log.info(f"rank {trainer.global_rank} received SIGTERM: training ends, on every rank, after the next step")
        if not averager.flag and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)  # as Lightning does: the processes that it started
        averager.flag = True

    setattr(connector, HANDLER, note)
    setattr(trainer.fit_loop.epoch_loop, BROADCAST, lambda: None)


def restore_handler(trainer: Trainer) -> None:
    """Restore Lightning's handler and its broadcast before each batch."""
    vars(trainer._signal_connector).pop(HANDLER, None)
    vars(trainer.fit_loop.epoch_loop).pop(BROADCAST, None)


def stop_after_batch(averager: Averager, trainer: Trainer) -> None:
    """After a step whose message had all ranks' flags: if any is set, Lightning ends all ranks after this batch."""
    trainer._signal_connector.received_sigterm = averager.flagged


def stop_before_dense_step(averager: GradientAverager, trainer: Trainer) -> None:
    """Before a dense step: end the run if any rank received a SIGTERM. Collective."""
    if averager.dense_step:
        flag = torch.tensor([averager.flag], dtype=torch.uint8, device=trainer.strategy.root_device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        if flag.item():
            trainer._signal_connector.received_sigterm = True
            raise SIGTERMException()
