"""SIGTERM, which clusters send before they reclaim a machine: every rank ends after the same step.

Lightning 2.6 broadcasts inside the signal handler. That broadcast collides with another rank's gradient exchange, and
both wait until the timeout. Lightning also broadcasts from rank 0 before every batch, which costs a round trip each.
Here the handler only sets the averager's flag. A compressed step or a delayed round sends the flag with its message. A
push sends it to the servers, whose answers name the step after which all ranks stop. Ranks also meet before a dense
step, and at the end of an epoch, after which there may be no step.

Ranks meet to save a checkpoint, too. Every meeting is the same collective, in which each rank says whether it saves. If
some ranks call `trainer.save_checkpoint` and others train on, all raise an error at once instead of waiting until the
timeout. They do wait if the next step is compressed, because ranks do not meet before it.

Private Lightning names used here: the Trainer's `_signal_connector` with its `_sigterm_notifier_fn` and
`received_sigterm`, the epoch loop's `_broadcast_sigterm_tensor`, and the fit loop's `on_advance_end`.
"""

from __future__ import annotations

import logging
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_gradcomp.averaging import Decision
from lightning_gradcomp.errors import refusal

if TYPE_CHECKING:
    from lightning_gradcomp.plugin.base_strategy import Averager, BaseStrategy

log = logging.getLogger(__name__)
HANDLER, BROADCAST, EPOCH_END = "_sigterm_notifier_fn", "_broadcast_sigterm_tensor", "on_advance_end"


def set_handler(trainer: Trainer) -> None:
    """Make SIGTERM set the flag of the strategy's averager. Call this before Lightning registers its handlers.

    It sets functions of this module, so that a fitting Trainer can be copied and pickled.
    """
    setattr(trainer._signal_connector, HANDLER, partial(_note, trainer))
    setattr(trainer.fit_loop.epoch_loop, BROADCAST, _nothing)
    setattr(trainer.fit_loop, EPOCH_END, partial(_end_epoch, trainer))


def restore_handler(trainer: Trainer) -> None:
    """Restore Lightning's handler, its broadcast before each batch, and its end-of-epoch hook."""
    vars(trainer._signal_connector).pop(HANDLER, None)
    vars(trainer.fit_loop.epoch_loop).pop(BROADCAST, None)
    vars(trainer.fit_loop).pop(EPOCH_END, None)


def _strategy(trainer: Trainer) -> BaseStrategy:
    return trainer.strategy  # type: ignore[return-value] - only our strategies set the handler


def _note(trainer: Trainer, signum: int, frame: FrameType | None) -> None:
    log.info(f"rank {trainer.global_rank} received SIGTERM: training ends on every rank after the next step")
    strategy = _strategy(trainer)
    if not strategy.averager.flag and strategy.launcher is not None:
        strategy.launcher.kill(signum)  # type: ignore[arg-type] - as Lightning does, for the processes it started
    strategy.averager.flag = True


def _nothing() -> None:
    """Do not broadcast."""


def _end_epoch(trainer: Trainer) -> None:
    """End the epoch as Lightning does; then end the run if any rank received a SIGTERM since its last step."""
    type(trainer.fit_loop).on_advance_end(trainer.fit_loop)
    with _strategy(trainer).explained("at the end of an epoch"):
        _stop_if_flagged(trainer)


def stop_after_batch(averager: Averager, trainer: Trainer) -> None:
    """Make Lightning end all ranks after this batch if any set its flag. Call it after an exchange of the flags."""
    trainer._signal_connector.received_sigterm = averager.flagged


def stop_before_dense_step(decision: Decision, trainer: Trainer) -> None:
    """End the run before a step that DDP averages, if any rank received a SIGTERM. Collective."""
    if decision.is_plain:
        _stop_if_flagged(trainer)


def _stop_if_flagged(trainer: Trainer) -> None:
    if meet(trainer.strategy.root_device, flag=_strategy(trainer).averager.flag):
        trainer._signal_connector.received_sigterm = True
        raise SIGTERMException()


def meet(device: torch.device, *, saving: bool = False, flag: bool = False) -> bool:
    """Wait for all ranks. Returns True if any set its flag. Collective.

    Raises ValueError if only some of them are `saving`: in `trainer.save_checkpoint`.
    """
    said = torch.tensor([flag, saving, not saving], dtype=torch.uint8, device=device)
    dist.all_reduce(said, dist.ReduceOp.MAX)
    any_flag, some_save, some_go_on = said.tolist()
    if some_save and some_go_on:
        allowed = "a call on every rank, as with DDP; or torch.save(module.state_dict(), path) on one"
        raise refusal("trainer.save_checkpoint", "a call on only some ranks", allowed)
    return bool(any_flag)
