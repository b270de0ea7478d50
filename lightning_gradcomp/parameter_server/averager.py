"""AsyncAverager: a worker that pushes compressed gradients to the servers and pulls weights at its own pace."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from lightning_gradcomp.averaging.faults import TIMEOUT
from lightning_gradcomp.averaging.stats import Stats
from lightning_gradcomp.compressors.base import Compressor
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.parameter_server.connection import POLL_SECONDS, Connection, ConnectionLost, connect
from lightning_gradcomp.parameter_server.messages import HELLO, LEAVE, PULL, PUSH, REFUSED, SKIP, Answer, Request
from lightning_gradcomp.parameter_server.server import agreement, built
from lightning_gradcomp.parameter_server.worker import Worker


@dataclass
class AsyncStats(Stats):
    """One step of one worker.

    `bytes_sent` and `bytes_received` are each the sum of its push and its pull: the average traffic of a rank that also
    runs a server.

    Args:
        staleness: number of pushes by other workers since this worker's last pull, on the first server.
        dropped: number of servers that dropped this push.
    """

    staleness: int = 0
    dropped: int = 0


class AsyncAverager(Worker):
    """A worker of dist_async: it trains with servers instead of its own optimizer.

        averager = AsyncAverager(model, optimizer, "dgc", servers=["10.0.0.1:29600"], secret=word)
        loss.backward()
        averager.step()              # pushes the gradient, pulls the weights

    The unsent part of a push stays in the residual, and so does a push that a server drops. The weights are the
    servers'. Learning rates are read from `optimizer` at each step, so schedulers work; changing any other option
    raises an error.

    Args:
        model: the bare module.
        optimizer: the optimizer of its parameters. It never steps: each server has one of the same class and options.
        compressor: compressor of the pushes, or its name. Must match the servers'.
        servers: server addresses, HOST:PORT, in partition order.
        secret: the servers' secret.
        pull: compressor of the pulls. Must match the servers'.
        world: number of workers, by which learning rates are divided: that many pushes then count as much as one step
            on the mean of their gradients.
        rank: number of this worker, from 0, in checkpoints of all workers.
        job: text that must match the servers', such as the options of a run.
        timeout: how long a server may take to answer.

    Raises:
        ValueError: if an option is invalid, or the secret, model or compressor differs from the servers'.
        ConnectionLost: if a server does not answer.
    """

    measures_residual = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        compressor: Compressor | str = "none",
        *,
        servers: Sequence[str],
        secret: str,
        pull: Compressor | str | None = None,
        world: int = 1,
        rank: int = 0,
        job: str = "",
        timeout: timedelta = TIMEOUT,
    ) -> None:
        if not servers:
            raise refusal("servers", servers, "the address, HOST:PORT, of each")
        pull = None if pull is None else built(pull, optimizer)
        super().__init__(model, optimizer, built(compressor, optimizer), pull, len(servers), world)
        self.rank = rank
        self.stats = AsyncStats()
        """Costs of the last step."""
        self.spent = Stats()
        """Costs of all steps."""
        self.staleness: Counter[int] = Counter()
        """Staleness -> number of steps that had it."""
        self.flag = False
        """A flag that asks all workers to stop, sent with the next push."""
        self.flagged = False
        """True if a worker's flag ends training here, after the same number of pushes on every worker."""
        self._connections: list[Connection] = []
        self._versions = [0] * len(servers)
        self.worker, clock = -1, 0
        try:
            for number, address in enumerate(servers):
                connection = connect(address, secret, timeout)
                self._connections.append(connection)
                how = self.gradients, optimizer, self.compressor, self.pull_compressor, job
                Request(HELLO, self.worker, clock, agreement(number, len(servers), *how), ()).send(connection)
                answer = self._receive(number, whole=True)
                if number == 0:
                    self.worker, clock = answer.accepted, answer.clock
        except BaseException:
            for connection in self._connections:
                connection.close()
            raise

    # Steps

    @torch.no_grad()
    def step(self, *, grad_scale: float = 1.0) -> None:
        """Push the gradients in `p.grad`, wait until the slowest worker is close enough, and pull the weights.

        A non-finite gradient is not pushed and leaves all state unchanged.

        Args:
            grad_scale: the loss scale by which the gradients are multiplied.

        Raises:
            ValueError: if a layer was frozen or unfrozen, or an option of the optimizer other than the learning rates
                has changed.
            ConnectionLost: if a server does not answer. This worker's residual is then unchanged.
            RuntimeError: after `close`.
        """
        self._check_connected("step")
        self.check_unchanged()
        stats = AsyncStats(dense_bytes=2 * self.gradients.nbytes)
        with stats.phase("compress"):
            bodies = self.encode(self.worker, grad_scale)
        with stats.phase("exchange"):
            for number, connection in enumerate(self._connections):
                kind, version = SKIP if bodies is None else PUSH, self._versions[number]
                request = Request(kind, self.worker, self.steps, version, self.rates, self.flag)
                body = () if bodies is None else (bodies[number], self.present[number])
                stats.bytes_sent += request.send(connection, *body)
        before, accepted = self._versions[0], []
        for number in range(len(self._connections)):
            answer = self._receive(number, whole=False, stats=stats)
            accepted.append(bool(answer.accepted))
            if number == 0:  # each server counts separately; the first decides
                self.flagged = answer.stop
        stats.bytes_sent = stats.bytes_received = stats.bytes_sent + stats.bytes_received
        stats.staleness = self._versions[0] - before - 1
        if bodies is not None:
            self.commit(accepted)
            stats.dropped = accepted.count(False)
        self.stats, self.steps = stats, self.steps + 1
        self.spent.add(stats)
        self.staleness[stats.staleness] += 1

    # Weights

    def _receive(self, number: int, *, whole: bool, stats: Stats | None = None) -> Answer:
        """Receive a server's answer and write the weights of its pull into the model."""
        connection, stats = self._connections[number], stats or Stats()
        with stats.phase("exchange"):
            answer = Answer.receive(connection)
            if answer.accepted == REFUSED:
                what = f"model, optimizer's groups, compressor, pull, job, servers, partition {number} or version"
                raise refusal(what, "one that differs from the server's", "the same on workers and servers")
            body = connection.receive(torch.empty(self.pull_bytes(number, whole), dtype=torch.uint8))
        with stats.phase("decompress"):
            self.assign(number, body, whole)
        self._versions[number] = answer.version
        stats.bytes_received += Answer.BYTES + body.numel()
        return answer

    def _ask(self, kind: int, connection: Connection) -> None:
        Request(kind, self.worker, self.steps, 0, len(self._groups) * (0.0,)).send(connection)

    def pull(self, timeout: timedelta = TIMEOUT) -> None:
        """Copy the servers' weights, all after the same pushes, into the model.

        Raises RuntimeError if other workers push without a pause until `timeout`, or after `close`.
        """
        self._check_connected("pull")
        begin = time.monotonic()
        while True:
            prints = set()
            for number, connection in enumerate(self._connections):
                self._ask(PULL, connection)
                prints.add(self._receive(number, whole=True).fingerprint)
            if len(prints) == 1:
                return
            if time.monotonic() - begin > timeout.total_seconds():
                raise RuntimeError("pull timed out: the servers never had the same pushes")
            time.sleep(POLL_SECONDS)

    @property
    def version(self) -> int:
        """Version of the first server's weights in this worker's last pull: the number of pushes by all workers."""
        return self._versions[0]

    @property
    def connected(self) -> bool:
        """True until `close`."""
        return bool(self._connections)

    def close(self) -> None:
        """Leave, so that other workers no longer wait for this one. Its state remains available to `state_dict`."""
        for connection in self._connections:
            with suppress(ConnectionLost):
                self._ask(LEAVE, connection)
            connection.close()
        self._connections = []

    def _check_connected(self, doing: str) -> None:
        if not self.connected:
            raise RuntimeError(f"AsyncAverager: {doing}() after close(): this worker has left; create another")

    # Log

    def metrics(self) -> dict[str, float]:
        """Clock, staleness, and dropped pushes of the latest step."""
        counts = {"clock": self.steps, "staleness": self.stats.staleness, "dropped": self.stats.dropped}
        return {f"async/{name}": float(count) for name, count in counts.items()}

    def summary(self) -> dict[str, Any]:
        """How often each staleness occurred."""
        seen = {str(staleness): steps for staleness, steps in sorted(self.staleness.items())}
        return {"topology": "dist_async", "auto": "", "async": {"staleness": seen}}

    def why_uncompressed(self) -> str:
        """Empty: all pushes are compressed."""
        return ""
