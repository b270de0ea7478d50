"""ElasticAverager: rounds among ranks that come and go. A lost rank costs the others one round, not the run.

Before each round, torchft (https://github.com/meta-pytorch/torchft) finds out which ranks are present: every rank sends
heartbeats to a lighthouse, which names the ranks of the round and reconnects them if they have changed. A rank that
joins or has missed rounds first receives the agreed weights from another.

If the exchange of a round fails, its updates are averaged with those of the next: each rank keeps its local steps in
its weights, and its residual unchanged. A lost rank's residual is lost, and so are the steps that it took after losing
contact.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_gradcomp.compressors.base import Compressor
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.local_sgd.averager import RoundLoop
from lightning_gradcomp.local_sgd.rounds import Nesterov, RoundReport
from lightning_gradcomp.local_sgd.schedule import RoundSchedule

log = logging.getLogger(__name__)


class ElasticAverager(RoundLoop):
    """Local steps, averaged among the processes that are present. Processes may join, leave and die at any time.

        averager = ElasticAverager(model, optimizer, lighthouse="http://10.0.0.1:29510", **SPARSELOCO)
        for batch in loader:
            optimizer.zero_grad()
            loss(model, batch).backward()
            averager.step()         # = optimizer.step(); every `period` steps the ranks average
        averager.shutdown()

    Needs torchft (`pip install -e '.[elastic]'` in a checkout) and a lighthouse: `torchft_lighthouse --min_replicas 1`.
    There is no torchrun and no world size: start each process separately, as one rank. Averages are not delayed.
    Between rounds each rank has its own weights; at the end of a round all ranks have the same.

    Args:
        model: the bare module. The first process starts from its own weights; later ones receive those of the ranks
            present. Layers may be frozen and unfrozen, on all ranks in the same round; this ends the round.
        optimizer: any torch optimizer, or a list of several. A new rank receives its moments with the weights, from the
            same rank.
        compressor: compresses the update of each round. Its warm-up must not count epochs.
        lighthouse: the address of torchft's lighthouse, http://HOST:PORT.
        period: K, the number of steps in a round.
        delay: must be 0; it exists so that `**SPARSELOCO` can be passed.
        error_decay: each rank keeps its residual and multiplies it by this factor once a round, 0 to 1.
        outer: an outer optimizer that steps on the mean update of a round. Default: the mean update is added.
        min_ranks: a round with fewer ranks is not averaged.
        name: this rank's name in logs. A unique suffix is added.
        host: name or address at which the other ranks reach this one. Default: this machine's host name.
        timeout: how long a collective may take before it fails, for example because a rank hangs. It must exceed the
            transfer time of a round.
        round_timeout: how long a rank waits for the others at the end of a round, and a new rank for their state.

    Raises:
        ValueError: if an option is invalid.
        ModuleNotFoundError: if torchft is not installed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
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
        schedule = RoundSchedule(period, 0)
        if delay != 0:
            raise refusal("ElasticAverager.delay", delay, "0: the ranks of a round are known at its end")
        if min_ranks < 1:
            raise refusal("ElasticAverager.min_ranks", min_ranks, "1 or more")
        super().__init__(model, optimizer, compressor, schedule, None, outer=outer, error_decay=error_decay)
        self._min_ranks, self._round_timeout = min_ranks, round_timeout
        from torchft import ProcessGroupGloo  # takes a second, and may not be installed

        from lightning_gradcomp.local_sgd.torchft_manager import start_manager

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

    @property
    def rounds(self) -> int:
        """Number of averages so far in the whole run."""
        return self._manager.current_step()

    @property
    def bytes_sent(self) -> int:
        """Bytes that left this rank in the latest round."""
        return self._rounds.bytes_sent

    def _report(self, samples: int) -> RoundReport:
        return RoundReport(samples, self.flag)  # ranks may be at different steps

    def _end_round(self) -> None:
        self.average()

    def _end_early(self) -> None:
        """End the round. Drop its steps if it can't be averaged, since the next round has other parameters."""
        if self._samples_in_round and not self.average():
            self._anchor.reset_model()
            self._samples_in_round = 0
        self._steps_since_drain = 0

    def average(self) -> bool:
        """End the round now and average with all ranks present, which must end theirs too.

        Returns:
            True if the average was applied. Otherwise a warning is logged, and this round's steps are averaged with
            those of the next.

        Raises:
            TimeoutError: if the lighthouse has not named the round's ranks within `round_timeout`.
        """
        self._steps_in_round = 0
        self._manager.start_quorum()  # receives the state of another rank, if this one is behind
        samples, reports, failure = self._samples_in_round, [], None
        try:
            reports = self._exchange()
        except RuntimeError as error:
            failure = error
            self._group.shutdown()
            self._change_group(None)  # closes its connections, so that no rank waits for this one
            self._manager.report_error(RuntimeError(str(error)))
        if not self._manager.should_commit():
            log.warning("round %d was not averaged; its steps carry over to the next: %s", self.rounds + 1, failure)
            self._samples_in_round = samples
            return False
        self._apply(reports)
        return True

    def _exchange(self) -> list[RoundReport]:
        """Exchange updates with the ranks of this round. Returns their reports.

        Raises RuntimeError if that fails.
        """
        if error := self._manager.errored():
            raise RuntimeError(str(error.original_exception))
        if (present := self._manager.num_participants()) < self._min_ranks:
            raise RuntimeError(f"{present} of {self._min_ranks} ranks")
        group = self._group.parent
        if group is not self.ranks.group:
            self._change_group(group)
            patient = dist.BarrierOptions()
            patient.timeout = self._round_timeout  # a rank that is behind first receives the state of another
            group.barrier(patient).wait()
        self._send_update()
        return self._receive()

    def _change_group(self, group: dist.ProcessGroup | None) -> None:
        """Average in this group from now on. This rank keeps its state."""
        self._use_group(group, self._rounds.shared_state())

    @contextmanager
    def agreed_weights(self) -> Iterator[None]:
        """Inside, the model holds the weights that all ranks last agreed on, to validate or save them."""
        own = [parameter.detach().clone() for parameter in self.model.parameters()]
        self._anchor.copy_to_model()
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(self.model.parameters(), own, strict=True):
                    parameter.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: its residual and its moments. Save the model's and the optimizer's state alongside it."""
        return {"steps": self.steps, "rounds": self._rounds.shared_state(), "manager": self._manager.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state`, before the first step. Load the model's (agreed weights) and the optimizer's first."""
        self._anchor.copy_from_model()
        self.steps = state["steps"]
        self._rounds.load_shared_state(state["rounds"])
        self._manager.load_state_dict(state["manager"])

    def _agreed(self) -> dict[str, Any]:
        """The state that a joining rank receives: weights, buffers, outer velocity, and this rank's moments."""
        outer = self._rounds.shared_state()["outer"]
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        weights = {
            name: (z if z.requires_grad else self._anchor.live[name]).detach().clone()
            for name, z in self._anchor.module.named_parameters()
        }
        moments = [optimizer.state_dict() for optimizer in self.optimizers]
        counts = {"steps": self.steps, "rounds": self._rounds.steps}
        return {"weights": weights, "buffers": buffers, "outer": outer, "optimizers": moments, **counts}

    @torch.no_grad()
    def _load_agreed(self, state: dict[str, Any]) -> None:
        for name, z in self._anchor.module.named_parameters():
            z.copy_(state["weights"][name])
            self._anchor.live[name].copy_(z)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(state["buffers"][name])
        self._anchor.reset_model()
        for optimizer, moments in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(moments)
        own = self._rounds.state_dict()
        self._rounds.load_shared_state({**own, "outer": state["outer"], "steps": state["rounds"]})
        self.steps, self._samples_in_round = state["steps"], 0

    def shutdown(self) -> None:
        """Leave the other ranks, which continue without this one."""
        self._manager.shutdown(wait=False)
