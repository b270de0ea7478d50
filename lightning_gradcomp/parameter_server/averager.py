"""AsyncAverager: a worker. It pushes compressed gradients to the servers and pulls weights, when it is ready."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from lightning_gradcomp.averaging.faults import TIMEOUT
from lightning_gradcomp.averaging.gradients import Gradients
from lightning_gradcomp.averaging.stats import Stats
from lightning_gradcomp.averaging.workers import Ranks
from lightning_gradcomp.compressors.base import Compressor, Lossy, PayloadCodec
from lightning_gradcomp.compressors.decoded import Decoded, Dense, concatenate
from lightning_gradcomp.compressors.layout import Layout
from lightning_gradcomp.compressors.local_gradient import LocalGradient
from lightning_gradcomp.compressors.state import Residual, State
from lightning_gradcomp.errors import refusal
from lightning_gradcomp.parameter_server.connection import Connection, ConnectionLost, connect
from lightning_gradcomp.parameter_server.messages import (
    HELLO,
    LEAVE,
    PULL,
    PUSH,
    REFUSED,
    SKIP,
    Answer,
    Request,
    fingerprint,
)
from lightning_gradcomp.parameter_server.server import built
from lightning_gradcomp.parameter_server.shard import agreed, codec_of, parts


@dataclass
class AsyncStats(Stats):
    """One step of one worker. Bytes are those of its push and its pull together, either way: so many leave a rank that
    is a server too, on average.

    Args:
        clock: the worker's steps so far.
        staleness: pushes that other workers have made since this worker's last pull, on the first server.
        dropped: servers that have dropped this push.
    """

    clock: int = 0
    staleness: int = 0
    dropped: int = 0


class AsyncAverager:
    """A worker of dist_async: trains with servers in place of an optimizer of its own.

        averager = AsyncAverager(model, optimizer, "dgc", servers=["10.0.0.1:29600"], secret=word)
        loss.backward()
        averager.step()              # pushes the gradient, pulls the weights

    What a push does not send is remembered, and so is a push that a server drops. The weights are the servers';
    learning rates are read from `optimizer` at each step, so schedulers work as they are.

    Args:
        model: the bare module.
        optimizer: over its parameters. It is not stepped: the servers have one of its class each.
        compressor: of the pushes, the same as the servers'; or its name.
        servers: their addresses, HOST:PORT, in the order of their shards.
        secret: theirs.
        pull: compressor of the pulls, the servers'.
        world: number of workers by which learning rates are divided, so that so many pushes count as much as a step on
            the mean of their gradients.
        timeout: how long a server may take to answer.

    Raises:
        ValueError: an option that can't be honoured, or a secret, model or compressor that is not the servers'.
        ConnectionLost: a server that does not answer.
    """

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
        timeout: timedelta = TIMEOUT,
    ) -> None:
        if not servers:
            raise refusal("servers", servers, "the address, HOST:PORT, of each")
        self.compressor, self.optimizer = built(compressor, optimizer), optimizer
        self._pull = None if pull is None else built(pull, optimizer)
        self.gradients = Gradients(model, self.compressor)
        self._parts = parts(self.gradients.layout, self.gradients.dense_layout, len(servers))
        self.state, self.dense_state = self._blank()
        self.world, self.steps = world, 0
        self.ranks = Ranks(None, world)
        """The workers that save checkpoints together; a strategy knows them."""
        self.shards = None
        """Models that FSDP2 has sharded are not taken."""
        """Steps so far: this worker's clock."""
        self.stats = AsyncStats()
        """Of the last step."""
        self.staleness: Counter[int] = Counter()
        """Staleness -> how many steps so far had it."""
        self._connections: list[Connection] = []
        self._versions = [0] * len(servers)
        worker, clock = -1, 0
        for number, address in enumerate(servers):
            connection = connect(address, secret, timeout)
            own = fingerprint(
                number, len(servers), *agreed(self.gradients, self.optimizer, self.compressor, self._pull)
            )
            Request(HELLO, worker, clock, own, ()).send(connection, torch.empty(0, dtype=torch.uint8))
            self._connections.append(connection)
            answer, body = self._receive(number, whole=True)
            self._use(number, answer, body, whole=True)
            worker, clock = (answer.accepted, answer.clock) if worker < 0 else (worker, clock)
        self.worker = worker

    def _blank(self) -> tuple[State, State]:
        layout, device = self.gradients.layout, self.gradients.device
        state: State = Residual(layout, device)  # also of what is unbiased: a dropped push has to stay somewhere
        if isinstance(self.compressor, Lossy) and self.compressor.remembers(self.optimizer) is not State:
            state = self.compressor.state(layout, device, self.optimizer)
        state.attach(self.optimizer, self.gradients.compressed)
        return state, Residual(self.gradients.dense_layout, device)

    @property
    def _rates(self) -> tuple[float, ...]:
        return tuple(float(group["lr"]) / self.world for group in self.optimizer.param_groups)

    # Steps

    @torch.no_grad()
    def step(self, *, grad_scale: float = 1.0) -> None:
        """Pushes the gradients in `p.grad`, waits until the slowest worker is near enough, and pulls the weights.

        A gradient that is not finite is not pushed, and leaves no trace.

        Args:
            grad_scale: the loss scale that is in the gradients.

        Raises:
            ConnectionLost: a server does not answer. What this worker remembers is as it was before the step.
        """
        gradients, stats = self.gradients, AsyncStats(clock=self.steps + 1, dense_bytes=2 * self.gradients.nbytes)
        with stats.phase("compress"):
            gradients.collect_dense(grad_scale)
            local = gradients.local_gradient(grad_scale)
            local_dense = LocalGradient.of(gradients.dense_flat.clone(), gradients.dense_layout)
            self.state.compensate(local, gradients.compressed_flat)
            self.dense_state.compensate(local_dense, gradients.dense_flat)
            finite = bool(local.finite & local_dense.finite)
            codec = codec_of(self.compressor, self.worker, self.steps)
            bodies, sent = (
                self._encode(codec) if finite else ([torch.empty(0, dtype=torch.uint8)] * len(self._parts), [])
            )
        with stats.phase("exchange"):
            for connection, version, body in zip(self._connections, self._versions, bodies, strict=True):
                request = Request(PUSH if finite else SKIP, self.worker, self.steps, version, self._rates)
                stats.bytes_sent += request.send(connection, body)
        before, accepted = self._versions[0], []
        for number in range(len(self._connections)):
            with stats.phase("exchange"):
                answer, body = self._receive(number, whole=False)
            with stats.phase("decompress"):
                self._use(number, answer, body, whole=False)
            accepted.append(bool(answer.accepted))
            stats.bytes_received += Answer.BYTES + body.numel()
        stats.bytes_sent = stats.bytes_received = stats.bytes_sent + stats.bytes_received
        stats.staleness = self._versions[0] - before - 1
        if finite:
            self._commit(sent, accepted)
            stats.dropped = accepted.count(False)
        self.stats, self.steps = stats, self.steps + 1
        self.staleness[stats.staleness] += 1

    def _encode(self, codec: PayloadCodec) -> tuple[list[torch.Tensor], list[Decoded]]:
        """For each server: a push's body, and what the payload in it decodes to."""
        gradients, bodies, sent = self.gradients, [], []
        for part in self._parts:
            flat, dense = part.of(gradients.compressed_flat, gradients.dense_flat)
            payload, decoded = _encode(codec, flat, part.layout)
            bodies.append(torch.cat([dense.cpu().view(torch.uint8), payload.cpu()]))
            sent.append(decoded)
        return bodies, sent

    def _commit(self, sent: list[Decoded], accepted: list[bool]) -> None:
        """Let the step count: what a server has accepted is taken out of what is remembered."""
        names = {name for name, has in zip(self.gradients.names, self.gradients.present, strict=True) if has}
        names |= self.state.started | self.dense_state.started
        taken = [
            (part, decoded)
            for part, decoded, counts in zip(self._parts, sent, accepted, strict=True)
            if counts and part.layout.n
        ]
        if taken:
            self.state.subtract(concatenate([decoded for _, decoded in taken], [part.start for part, _ in taken]))
        pushed = torch.zeros_like(self.gradients.dense_flat)
        for part, counts in zip(self._parts, accepted, strict=True):
            if counts:
                _, values = part.of(self.gradients.compressed_flat, self.gradients.dense_flat)
                part.of(self.gradients.compressed_flat, pushed)[1].copy_(values)
        self.dense_state.subtract(Dense(pushed))
        self.gradients.compressed_flat = self.state.commit(names, self.gradients.compressed_flat)
        self.gradients.dense_flat = self.dense_state.commit(names, self.gradients.dense_flat)

    # Weights

    def _receive(self, number: int, whole: bool) -> tuple[Answer, torch.Tensor]:
        """A server's answer, and the body of the pull in it (uint8)."""
        answer = Answer.receive(self._connections[number])
        if answer.accepted == REFUSED:
            what = f"model, optimizer's groups, compressor, pull, servers, shard {number} or version"
            raise refusal(what, "another than the server's", "the same on workers and servers")
        return answer, self._connections[number].receive(
            torch.empty(self._pull_bytes(number, whole), dtype=torch.uint8)
        )

    def _pull_bytes(self, number: int, whole: bool) -> int:
        part = self._parts[number]
        if whole or self._pull is None:
            return 4 * (part.layout.n + part.dense_layout.n)
        return part.body_bytes(codec_of(self._pull, 0, 0))

    def _use(self, number: int, answer: Answer, body: torch.Tensor, whole: bool) -> None:
        """Lets the model have the weights of a pull."""
        part, end = self._parts[number], 4 * self._parts[number].dense_layout.n
        self._write(part.dense_layout, body[:end].view(torch.float32), add=False)
        if part.layout.n and (whole or self._pull is None):
            self._write(part.layout, body[end:].view(torch.float32), add=False)
        elif part.layout.n and self._pull is not None:
            change = torch.zeros(part.layout.n)
            codec_of(self._pull, 0, 0).decode(body[end:], part.layout).add_to(change)
            self._write(part.layout, change, add=True)
        self._versions[number] = answer.version

    @torch.no_grad()
    def _write(self, layout: Layout, values: torch.Tensor, *, add: bool) -> None:
        by_name = self._by_name
        for name, view in zip(layout.names, layout.views(values), strict=True):
            if add:
                by_name[name].add_(view.to(by_name[name].device))
            else:
                by_name[name].copy_(view)

    @property
    def _by_name(self) -> Mapping[str, torch.Tensor]:
        return dict(zip(self.gradients.names, self.gradients.parameters, strict=True))

    def _ask(self, kind: int, connection: Connection) -> None:
        Request(kind, self.worker, self.steps, 0, self._rates).send(connection, torch.empty(0, dtype=torch.uint8))

    def pull(self, timeout: timedelta = TIMEOUT) -> None:
        """Lets the model have the servers' weights, whole, all of them with the same pushes.

        Raises:
            RuntimeError: other workers pushed without a pause for so long.
        """
        begin = time.monotonic()
        while True:
            prints = []
            for number, connection in enumerate(self._connections):
                self._ask(PULL, connection)
                answer, body = self._receive(number, whole=True)
                self._use(number, answer, body, whole=True)
                prints.append(answer.fingerprint)
            if len(set(prints)) == 1:
                return
            if time.monotonic() - begin > timeout.total_seconds():
                raise RuntimeError("pull: the servers never had the same pushes while it lasted")

    @property
    def connected(self) -> bool:
        """Whether the servers can be asked: not after `close`."""
        return bool(self._connections)

    def close(self) -> None:
        """Leave: the others wait for this worker no longer."""
        for connection in self._connections:
            with suppress(ConnectionLost):
                self._ask(LEAVE, connection)
        self._connections = []

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What this worker remembers: tensors by parameter name and plain numbers."""
        dense = {f"dense_{kind}": parts for kind, parts in self.dense_state.state_dict().items()}
        return {
            "steps": self.steps,
            "memory": {**self.state.state_dict(), **dense},
            "shapes": self.gradients.chosen,
            "dense_shapes": self.gradients.left_dense,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` returned, of this worker or of one that is gone."""
        compressed, dense = self._blank()
        compressed.load_state_dict(state["memory"])
        dense.load_state_dict({"residual": state["memory"]["dense_residual"]})
        self.state, self.dense_state, self.steps = compressed, dense, state["steps"]


def _encode(codec: PayloadCodec, flat: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, Decoded]:
    """A server that has too few parameters gets an empty payload."""
    return codec.encode(flat, layout) if layout.n else (torch.empty(0, dtype=torch.uint8), Dense(flat))
