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
from lightning_gradcomp.parameter_server.messages import HELLO, LEAVE, PULL, PUSH, SKIP, Answer, Request, digest
from lightning_gradcomp.parameter_server.partition import check_pull
from lightning_gradcomp.parameter_server.server import agreement, built
from lightning_gradcomp.parameter_server.worker import Worker


@dataclass
class AsyncStats(Stats):
    """One step of one worker.

    `bytes_sent` and `bytes_received` are each the sum of its push and its pull: the average traffic of a rank that also
    runs a server.
    """

    staleness: int = 0
    """Number of pushes by other workers since this worker's last pull, on the first server."""


class AsyncAverager(Worker):
    """A worker of dist_async: it trains with servers instead of its own optimizer.

        averager = AsyncAverager(model, optimizer, "dgc", servers=["10.0.0.1:29600"], secret=word)
        loss.backward()
        averager.step()              # pushes the gradient, pulls the weights

    The unsent part of a push stays in the residual. The weights are the servers'. Learning rates are read from
    `optimizer` at each step, so schedulers work; changing any other option raises an error.

    Args:
        model: the bare module.
        optimizer: the optimizer of its parameters. It never steps: each server has one of the same class and options.
        compressor, secret, pull: as for `ParameterServer`; the same as the servers'.
        servers: server addresses, HOST:PORT, in partition order.
        world: number of workers, by which learning rates are divided: that many pushes then count as much as one step
            on the mean of their gradients.
        rank: number of this worker, from 0, in checkpoints of all workers.
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
        pull: str = "fp32",
        world: int = 1,
        rank: int = 0,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        if not servers:
            raise refusal("servers", servers, "the address, HOST:PORT, of each")
        check_pull(pull)
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
                connection = connect(address)
                self._connections.append(connection)
                settings = agreement(number, len(servers), self.gradients, optimizer, self.compressor, pull)
                shake_hands(connection, secret, settings)
                connection.set_timeout(timeout)
                Request(HELLO, self.worker, clock, self.rates).send(connection)
                answer = self._receive(number, whole=True)
                if number == 0:
                    self.worker, clock = answer.worker, answer.clock
        except BaseException:
            for connection in self._connections:
                connection.close()
            raise

    # Steps

    @torch.no_grad()
    def step(self, *, grad_scale: float = 1.0) -> None:
        """Push the gradients in `p.grad`, wait until the slowest worker is close enough, and pull the weights.

        A non-finite gradient is not pushed and leaves all state unchanged. `grad_scale` is the loss scale by which the
        gradients are multiplied.

        Raises:
            ValueError: if a layer was frozen or unfrozen, or an option of the optimizer other than the learning rates
                has changed.
            ConnectionLost: if a server does not answer. This worker's residual is then unchanged.
        """
        self._check_connected("step")
        self.check_unchanged()
        stats = AsyncStats(dense_bytes=2 * self.gradients.nbytes)
        stats.now("compress")
        pushes = self.encode(self.worker, grad_scale)
        stats.now("exchange")
        for number, connection in enumerate(self._connections):
            request = Request(PUSH if pushes else SKIP, self.worker, self.steps, self.rates, self.flag)
            stats.bytes_sent += request.send(connection, *(pushes[number] if pushes else ()))
        before = self._versions[0]
        for number in range(len(self._connections)):
            answer = self._receive(number, whole=False, stats=stats)
            if number == 0:  # each server counts separately; the first decides
                self.flagged = answer.stop
        stats.now(None)
        stats.bytes_sent = stats.bytes_received = stats.bytes_sent + stats.bytes_received
        stats.staleness = self._versions[0] - before - 1
        if pushes:
            self.commit()
        self.stats, self.steps = stats, self.steps + 1
        self.spent.add(stats)
        self.staleness[stats.staleness] += 1

    # Weights

    def _receive(self, number: int, *, whole: bool, stats: Stats | None = None) -> Answer:
        """Receive a server's answer and write the weights of its pull into the model."""
        connection, stats = self._connections[number], stats or Stats()
        stats.now("exchange")
        answer = Answer.receive(connection)
        body = connection.receive(torch.empty(self.pull_bytes(number, whole), dtype=torch.uint8))
        stats.now("decompress")
        self.assign(number, body, whole)
        self._versions[number] = answer.version
        stats.bytes_received += Answer.BYTES + body.numel()
        return answer

    def pull(self, timeout: timedelta = TIMEOUT) -> None:
        """Copy the servers' weights, all after the same pushes, into the model.

        Raises RuntimeError if other workers push without a pause until `timeout`.
        """
        self._check_connected("pull")
        begin = time.monotonic()
        while True:
            prints = set()
            for number, connection in enumerate(self._connections):
                Request(PULL, self.worker, self.steps, self.rates).send(connection)
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
                Request(LEAVE, self.worker, self.steps, self.rates).send(connection)
            connection.close()
        self._connections = []

    def _check_connected(self, doing: str) -> None:
        if not self.connected:
            raise RuntimeError(f"AsyncAverager: {doing}() after close(): this worker has left; create another")

    # Log

    def metrics(self) -> dict[str, float]:
        """Clock and staleness of the latest step."""
        return {"async/clock": float(self.steps), "async/staleness": float(self.stats.staleness)}

    def summary(self) -> dict[str, Any]:
        """How often each staleness occurred."""
        seen = {str(staleness): steps for staleness, steps in sorted(self.staleness.items())}
        return {"topology": "dist_async", "auto": "", "async": {"staleness": seen}}

    def why_uncompressed(self) -> str:
        """Empty: all pushes are compressed."""
        return ""


def shake_hands(connection: Connection, secret: str, settings: tuple[object, ...]) -> None:
    """Exchange digests with a server. Raises ValueError if its secret, settings or version are others."""
    connection.send(digest(secret, "worker", *settings))
    expected = digest(secret, "server", *settings)
    if not torch.equal(connection.receive(torch.empty_like(expected)), expected):
        what = "secret, model, optimizer's groups, compressor, pull, number or order of servers, or version"
        raise refusal(what, "one that differs from the server's", "the same on workers and servers")
