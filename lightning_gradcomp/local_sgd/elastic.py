"""ElasticAverager: rounds among ranks that come and go. A lost rank costs the others one round, not the run.

Who is there is found out before each round by torchft (https://github.com/meta-pytorch/torchft): a lighthouse, to which
every rank sends heartbeats, names the ranks of the round and connects them anew where they have changed. A rank that
has missed rounds, or comes new, first receives the agreed weights from one that has not.

A round whose exchange fails is averaged with the next: local steps stay in the rank's weights, and what was left to be
sent stays as it was. What a lost rank had not sent is lost with it, and so are the steps that a rank has made since it
lost the others.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_gradcomp.compressors.base import Compressor
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.local_sgd.anchor import Anchor
from lightning_gradcomp.local_sgd.outer_optimizer import PLAIN_AVERAGING, Nesterov
from lightning_gradcomp.local_sgd.round_report import RoundReport
from lightning_gradcomp.local_sgd.rounds import Rounds, check_error_decay
from lightning_gradcomp.local_sgd.schedule import RoundSchedule
from lightning_gradcomp.local_sgd.sync import zero_nonfinite_state
from lightning_gradcomp.registry import build

log = logging.getLogger(__name__)


class ElasticAverager:
    """Local steps, and averages among the processes that are present. They may join, leave and die at any time.

        averager = ElasticAverager(model, optimizer, lighthouse="http://10.0.0.1:29510", **SPARSELOCO)
        for batch in loader:
            optimizer.zero_grad()
            loss(model, batch).backward()
            averager.step()         # = optimizer.step(); every `period` steps the ranks average
        averager.shutdown()

    Needs torchft (`pip install -e '.[elastic]'` in a checkout) and a lighthouse: `torchft_lighthouse --min_replicas 1`.
    There is no torchrun and no world size: you start each process separately, and it is one rank. Averages are not
    delayed. Between rounds each rank has its own weights; at the end of a round all have the same.

    Args:
        model: the bare module. The first process starts from its own weights; the others receive those of the ranks
            that are present. Layers may be frozen and unfrozen, on all ranks in the same round, which ends there.
        optimizer: any. A new rank starts with the moments of the rank from which it receives the weights.
        compressor: compresses the update of each round. Its warm-up must not count epochs.
        lighthouse: the address of torchft's lighthouse, http://HOST:PORT.
        period: K, the number of steps in a round.
        delay: must be 0; it exists so that `**SPARSELOCO` can be passed.
        error_decay: the residuals stay with the ranks and are multiplied by it once a round, 0 to 1.
        outer: an outer optimizer that steps on the mean update of a round. Default: the mean update is added.
        min_ranks: a round with fewer ranks is not averaged.
        name: of this rank, for logs. A unique suffix is added.
        host: name or address under which the other ranks reach this one. Default: this machine's host name.
        timeout: how long a collective may take before it fails, as it does if a rank hangs. It must be longer than the
            transfer of a round.
        round_timeout: how long a rank waits for the others at the end of a round, and a new rank for their state.

    Raises:
        ValueError: an invalid option.
        ModuleNotFoundError: torchft is not installed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        compressor: Compressor | str = "none",
        *,
        lighthouse: str,
        period: int = 15,
        delay: int = 0,
        error_decay: float = 1.0,
        outer: Nesterov | None = None,
        min_ranks: int = 1,
        name: str = "rank",
        host: str | None = None,
        timeout: timedelta = timedelta(seconds=10),
        round_timeout: timedelta = timedelta(minutes=5),
    ) -> None:
        RoundSchedule(period, 0)  # refuses
        check_error_decay(error_decay)
        if delay != 0:
            raise refusal("ElasticAverager.delay", delay, "0: who takes part in a round is known at its end")
        if min_ranks < 1:
            raise refusal("ElasticAverager.min_ranks", min_ranks, "1 or more")
        from torchft import ProcessGroupGloo  # takes a second, and may not be installed

        from lightning_gradcomp.local_sgd.torchft_manager import start_manager

        self.model, self.optimizer, self.period = model, optimizer, period
        self.steps = 0
        """Optimizer steps so far; a rank that comes new goes on from those of the others."""
        self._compressor, self._error_decay = build(compressor), error_decay
        self._outer, self._min_ranks = outer or PLAIN_AVERAGING, min_ranks
        self._round_timeout = round_timeout
        self._steps_in_round = self._samples = 0
        self._anchor = Anchor(model)
        self._rounds = self._rounds_in(None)
        self._group = ProcessGroupGloo(timeout=timeout)
        self._manager, self._store = start_manager(
            lighthouse,
            host or socket.gethostname(),
            pg=self._group,
            load_state_dict=self._load_agreed,
            state_dict=self._agreed,
            min_replica_size=min_ranks,
            round_timeout=round_timeout,
            replica_id=name,
        )

    def _rounds_in(self, group: dist.ProcessGroup | None) -> Rounds:
        how = self._outer, None, self.optimizer, self._error_decay
        return Rounds(self._anchor, self._compressor, group, *how, period=self.period)

    @property
    def rounds(self) -> int:
        """Averages so far, of all ranks together."""
        return self._manager.current_step()

    @property
    def world(self) -> int:
        """Ranks in the latest round."""
        return self._rounds.world

    @property
    def bytes_sent(self) -> int:
        """Bytes that left this rank in the latest round."""
        return self._rounds.stats.bytes_sent

    def step(self, weight: int = 1) -> None:
        """Step the optimizer; at the end of a round average.

        Args:
            weight: samples in this step, its weight in the average; 0: the optimizer does not step.
        """
        if self._anchor.trainable_changed:
            self._follow_trainable()
        if weight:
            self.optimizer.step()
        self.steps += 1
        self._steps_in_round += 1
        self._samples += weight
        if self._steps_in_round >= self.period:
            self.average()

    def _follow_trainable(self) -> None:
        """Where layers were frozen or unfrozen, end the round first; what is not averaged then is dropped."""
        if self._samples and not self.average():
            self._anchor.reset_model()
            self._samples = 0
        self._anchor.refresh_trainable()
        self._anchor.copy_from_model()

    def average(self) -> bool:
        """End the round now: average with all ranks that are there. They have to end theirs, too.

        Returns:
            Whether the average was applied. If not, a warning is logged, and this round's steps are averaged with those
            of the next.

        Raises:
            TimeoutError: the lighthouse has not named the round's ranks within `round_timeout`.
        """
        self._steps_in_round = 0
        self._manager.start_quorum()  # receives the state of another rank, if this one is behind
        failure = self._failure()
        if failure:
            self._group.shutdown()
            self._use_group(None)  # now its connections are closed, so that no rank waits for this one
            self._manager.report_error(RuntimeError(failure))
        if not self._manager.should_commit():
            log.warning("round %d is not averaged, its steps are with those of the next: %s", self.rounds + 1, failure)
            return False
        self._rounds.step_outer_optimizer()
        self._anchor.reset_model()
        self._samples = 0
        return True

    def _failure(self) -> str | None:
        """Exchange with the ranks of this round; if that fails, why."""
        if error := self._manager.errored():
            return str(error.original_exception)
        if (there := self._manager.num_participants()) < self._min_ranks:
            return f"{there} of {self._min_ranks} ranks"
        try:
            self._follow_quorum()
            self._exchange()
        except RuntimeError as error:
            return str(error)
        return None

    def _exchange(self) -> None:
        samples = self._samples
        if not self._anchor.set_pseudo_gradients():
            zero_nonfinite_state(self.optimizer)
            samples = 0
        self._rounds.exchange(RoundReport(samples), self.steps)

    def _follow_quorum(self) -> None:
        """Where the ranks have changed, go on in their new group.

        A rank that is behind receives the state of another before it comes here, and the others wait for it.
        """
        group = self._group.parent
        if group is not self._rounds.ranks.group:
            self._use_group(group)
            patient = dist.BarrierOptions()
            patient.timeout = self._round_timeout
            group.barrier(patient).wait()

    def _use_group(self, group: dist.ProcessGroup | None) -> None:
        """Average in this group from now on; what this rank remembers stays with it."""
        state = self._rounds.shared_state()
        self._rounds = self._rounds_in(group)
        self._rounds.load_shared_state(state)

    @contextmanager
    def agreed_weights(self) -> Iterator[None]:
        """Inside, the model has the weights that all ranks agreed on last: for validation, or to save them."""
        own = [parameter.detach().clone() for parameter in self.model.parameters()]
        self._anchor.copy_to_model()
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(self.model.parameters(), own, strict=True):
                    parameter.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: what it has not sent, and its moments. The model's and the optimizer's come beside it."""
        return {"steps": self.steps, "rounds": self._rounds.shared_state(), "manager": self._manager.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, before the first step; load the model's (agreed weights) and the optimizer's first."""
        self._anchor.copy_from_model()
        self.steps = state["steps"]
        self._rounds.load_shared_state(state["rounds"])
        self._manager.load_state_dict(state["manager"])

    def _agreed(self) -> dict[str, Any]:
        """What a rank that comes new receives: agreed weights, buffers, outer velocity, and this one's moments."""
        outer = self._rounds.shared_state()["outer"]
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        weights = {
            name: (z if z.requires_grad else self._anchor.live[name]).detach().clone()
            for name, z in self._anchor.module.named_parameters()
        }
        moments, counts = self.optimizer.state_dict(), {"steps": self.steps, "rounds": self._rounds.steps}
        return {"weights": weights, "buffers": buffers, "outer": outer, "optimizer": moments, **counts}

    @torch.no_grad()
    def _load_agreed(self, state: dict[str, Any]) -> None:
        for name, z in self._anchor.module.named_parameters():
            z.copy_(state["weights"][name])
            self._anchor.live[name].copy_(z)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(state["buffers"][name])
        self._anchor.reset_model()
        self.optimizer.load_state_dict(state["optimizer"])
        own = self._rounds.state_dict()
        self._rounds.load_shared_state({**own, "outer": state["outer"], "steps": state["rounds"]})
        self.steps, self._samples = state["steps"], 0

    def shutdown(self) -> None:
        """Leave the others: they go on without this rank."""
        self._manager.shutdown(wait=False)
