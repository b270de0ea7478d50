"""ParameterServer: serves a partition of the weights, with one thread and one connection per worker."""

from __future__ import annotations

import hmac
import logging
import math
import threading
from contextlib import closing
from datetime import timedelta
from itertools import count

import torch
from torch import nn

from lightning_gradcomp.averaging.faults import TIMEOUT
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.compressors.base import Compressor, LossyCompressor, build, check_no_clipping
from lightning_gradcomp.errors import is_number, refusal
from lightning_gradcomp.parameter_server.clocks import Clocks
from lightning_gradcomp.parameter_server.connection import Connection, ConnectionLost, Listener
from lightning_gradcomp.parameter_server.messages import DIGEST_BYTES, LEAVE, PULL, SKIP, Answer, Request, digest
from lightning_gradcomp.parameter_server.partition import ServerPartition, check_pull, codec_of, parts

log = logging.getLogger(__name__)


def built(compressor: Compressor | str, optimizer: torch.optim.Optimizer) -> Compressor:
    """The compressor of this name, or the one given.

    Raises ValueError if it can't compress pushes with this optimizer.
    """
    made = build(compressor)
    check_compressor(made)
    made = made.for_optimizer(optimizer)
    made.check_optimizer(optimizer)
    if made.state_for(optimizer).accumulates_steps:
        what = f"{type(made).__name__} with dist_async"
        raise refusal(what, type(optimizer).__name__, "SGD; with Adam, compressor='none'")
    return made


def check_compressor(compressor: Compressor) -> None:
    """Raises ValueError if a server can't decode a single push of this compressor, or if it has a warm-up or clips."""
    codec_of(compressor, 0, 0)
    name = type(compressor).__name__
    for option in ("warmup_steps", "warmup_epochs", "dense_epochs"):
        if length := getattr(compressor, option, 0):
            raise refusal(f"{name}.{option} with dist_async", length, "0: every push is compressed")
    check_no_clipping(compressor, "with dist_async")
    start = getattr(compressor, "start_sparsity", None)
    if isinstance(compressor, LossyCompressor) and start is not None and start < (final := compressor.final_sparsity):
        raise refusal(f"{name}.start_sparsity with dist_async", start, f"None: every push is at sparsity {final:g}")


def agreement(
    number: int,
    servers: int,
    gradients: Gradients,
    optimizer: torch.optim.Optimizer,
    compressor: Compressor,
    pull: str,
) -> tuple[object, ...]:
    """The settings that server `number` and its workers must share."""
    return number, servers, gradients.layout, gradients.dense_layout, len(optimizer.param_groups), compressor, pull


class ParameterServer:
    """Holds a partition of a model's weights, applies an optimizer to it at each push, and answers pulls.

        server = ParameterServer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "dgc", secret=word)
        server.start()
        print(server.address)

    Args:
        model: holds the initial weights, which are copied.
        optimizer: the optimizer of its parameters. Its class and options are used; workers send learning rates.
        compressor: compressor of the pushes, or its name. The same on all workers.
        secret: a word that every worker must present.
        host: address or name of the interface to listen on, IPv4 or IPv6. Default: loopback.
        port: port to listen on; 0 picks a free one, shown in `address`.
        partition: the number of this server, from 0. The parameters are divided among the servers.
        servers: number of servers.
        staleness, pull: as for `AsyncStrategy`. `pull` is the same on all workers.
        timeout: how long to wait for a worker's next message before the worker counts as lost.

    Raises:
        ValueError: if an option is invalid.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        compressor: Compressor | str = "none",
        *,
        secret: str,
        host: str = "127.0.0.1",
        port: int = 0,
        partition: int = 0,
        servers: int = 1,
        staleness: float = math.inf,
        pull: str = "fp32",
        timeout: timedelta = TIMEOUT,
    ) -> None:
        check_staleness(staleness)
        check_pull(pull)
        if not secret:
            raise refusal("secret", secret, "a word that workers must know")
        if not 0 <= partition < servers:
            raise refusal("partition", partition, f"0 to {servers - 1}, of {servers} servers")
        self.compressor = built(compressor, optimizer)
        gradients = Gradients(model, self.compressor, optimizers=[optimizer])
        names = dict(zip(gradients.names, gradients.parameters, strict=True))
        part = parts(gradients.layout, gradients.dense_layout, servers)[partition]
        self.partition = ServerPartition(names, part, optimizer, self.compressor, pull=pull)
        """The weights and their optimizer."""
        settings = agreement(partition, servers, gradients, optimizer, self.compressor, pull)
        self._digest, self._workers_digest = (digest(secret, end, *settings) for end in ("server", "worker"))
        self.clocks = Clocks(staleness)
        self._groups, self._timeout = len(optimizer.param_groups), timeout
        self._listener = Listener(host, port)
        self.address = self._listener.address
        """HOST:PORT, for workers."""
        self._numbers = count(1)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="parameter server", daemon=True)
        self._connections: list[threading.Thread] = []
        """A thread for each connected worker."""

    def start(self) -> None:
        """Start serving, in threads. Call once, before `stop`."""
        if self._stopped.is_set():
            raise RuntimeError(f"parameter server {self.address}: start() after stop(); create another ParameterServer")
        self._thread.start()

    def stop(self) -> None:
        """Stop accepting workers. Connected ones are served until they leave."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self._listener.close()

    def join(self) -> None:
        """After `stop`, wait until all connected workers have left or are lost."""
        for connection in self._connections:
            connection.join()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            connection = self._listener.accept()
            if connection is not None:
                thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                self._connections = [*filter(threading.Thread.is_alive, self._connections), thread]
                thread.start()

    def _serve(self, connection: Connection) -> None:
        """Serve one worker until it leaves or is lost. The only effect on others: they no longer wait for it."""
        worker = None
        with closing(connection):
            try:
                self._shake_hands(connection)
                hello = Request.receive(connection, self._groups)
                worker = next(self._numbers) if hello.worker < 0 else hello.worker
                clock = self.clocks.join(worker, None if hello.worker < 0 else hello.clock)
                pull = self.partition.pull(whole=True)
                Answer(worker, clock, pull.version, pull.fingerprint).send(connection, pull.body)
                while self._answer(connection, worker):
                    pass
            except ConnectionLost as error:
                log.warning(f"parameter server {self.address}: {error}")
            finally:
                if worker is not None:
                    self.clocks.leave(worker)
                    self.partition.forget(worker)

    def _shake_hands(self, connection: Connection) -> None:
        """Exchange digests. Raises ConnectionLost if the other end's is another."""
        said = connection.receive(torch.empty(DIGEST_BYTES, dtype=torch.uint8))
        known = hmac.compare_digest(bytes(said.tolist()), bytes(self._workers_digest.tolist()))
        connection.send(self._digest if known else torch.zeros_like(self._digest))
        if not known:
            raise ConnectionLost(f"refused {connection.peer}: another secret, model, compressor or version")
        connection.set_timeout(self._timeout)

    def _answer(self, connection: Connection, worker: int) -> bool:
        """Receive one request and answer it. Returns False if the worker leaves."""
        request, partition = Request.receive(connection, self._groups), self.partition
        if request.kind == LEAVE:
            return False
        stop = False
        if request.kind != PULL:
            codec = codec_of(self.compressor, worker, request.clock)
            lengths = (0, 0, 0) if request.kind == SKIP else partition.part.push_bytes(self.compressor, codec)
            partition.push(request, *(connection.receive(torch.empty(n, dtype=torch.uint8)) for n in lengths))
            stop = self.clocks.tick(worker, request.flag)
            self.clocks.wait(worker, self._timeout.total_seconds())
        pull = partition.pull(whole=request.kind == PULL)
        Answer(worker, request.clock, pull.version, pull.fingerprint, stop).send(connection, pull.body)
        return True


def check_staleness(staleness: float) -> None:
    """Raises ValueError unless `staleness` is a whole number from 0, or math.inf."""
    whole = is_number(staleness) and staleness == int(staleness)
    if staleness != math.inf and not (whole and staleness >= 0):
        raise refusal("staleness", staleness, "a whole number from 0, or math.inf")
