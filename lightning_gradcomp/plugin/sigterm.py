"""SIGTERM, as clusters send it before they take a machine away: every rank ends after the same step.

Lightning 2.6 broadcasts from inside the signal handler, where it meets another rank's exchange of gradients, and both
wait until the timeout; it also broadcasts from rank 0 before every batch, one round trip each. Here the handler only
sets a flag. A compressed step, or a delayed round, sends it with its message; before a dense step, and at the end of an
epoch, which no step may follow, it is all-reduced; a push has it for the servers, whose answers say after which step
all stop.

Private Lightning names used here: the Trainer's `_signal_connector` with its `_sigterm_notifier_fn` and
`received_sigterm`, the epoch loop's `_broadcast_sigterm_tensor`, and the fit loop's `on_advance_end`.
"""

from __future__ import annotations

import logging
from functools import partial
from types import FrameType

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_gradcomp.averaging import Decision, GradientAverager
from lightning_gradcomp.local_sgd.averager import DelayedAverager
from lightning_gradcomp.parameter_server.averager import AsyncAverager
from lightning_gradcomp.plugin.meeting import meet

log = logging.getLogger(__name__)
Averager = GradientAverager | DelayedAverager | AsyncAverager
HANDLER, BROADCAST, EPOCH_END = "_sigterm_notifier_fn", "_broadcast_sigterm_tensor", "on_advance_end"


def set_handler(trainer: Trainer) -> None:
    """Set the flag of the strategy's averager at SIGTERM. Call it before Lightning registers its handlers.

    Module-level functions, so that a Trainer can be copied and saved while it fits.
    """
    setattr(trainer._signal_connector, HANDLER, partial(_note, trainer))
    setattr(trainer.fit_loop.epoch_loop, BROADCAST, _nothing)
    setattr(trainer.fit_loop, EPOCH_END, partial(_end_epoch, trainer))


def restore_handler(trainer: Trainer) -> None:
    """Restore Lightning's handler, its broadcast before each batch, and its end of an epoch."""
    vars(trainer._signal_connector).pop(HANDLER, None)
    vars(trainer.fit_loop.epoch_loop).pop(BROADCAST, None)
    vars(trainer.fit_loop).pop(EPOCH_END, None)


def _note(trainer: Trainer, signum: int, frame: FrameType | None) -> None:
    log.info(f"rank {trainer.global_rank} received SIGTERM: training ends, on every rank, after the next step")
    averager: Averager = trainer.strategy.averager  # type: ignore[attr-defined]
    if not averager.flag and trainer.strategy.launcher is not None:
        trainer.strategy.launcher.kill(signum)  # as Lightning does: the processes that it started
    averager.flag = True


def _nothing() -> None:
    """Do not broadcast."""


def _end_epoch(trainer: Trainer) -> None:
    """End the epoch as Lightning does; then end the run if any rank received a SIGTERM since its last step."""
    type(trainer.fit_loop).on_advance_end(trainer.fit_loop)
    with trainer.strategy.explained("at the end of an epoch"):  # type: ignore[attr-defined]
        _stop_if_flagged(trainer)


def stop_after_batch(averager: Averager, trainer: Trainer) -> None:
    """After a step whose message had all ranks' flags: if any is set, Lightning ends all ranks after this batch."""
    trainer._signal_connector.received_sigterm = averager.flagged


def stop_before_dense_step(decision: Decision, trainer: Trainer) -> None:
    """Before a dense step: end the run if any rank received a SIGTERM. Collective."""
    if decision.by_ddp:
        _stop_if_flagged(trainer)


def _stop_if_flagged(trainer: Trainer) -> None:
    averager: Averager = trainer.strategy.averager  # type: ignore[attr-defined]
    if meet(trainer.strategy.root_device, flag=averager.flag):
        trainer._signal_connector.received_sigterm = True
        raise SIGTERMException()
