"""The messages between a worker and a server.

A connection begins with a handshake: the worker sends a digest of the secret and of all settings that both must share,
and the server answers with its own. Then come requests and answers: a header of numbers, then tensors.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

import torch

from lightning_gradcomp.parameter_server.connection import Connection

PROTOCOL = 4
DIGEST_BYTES = 32
HELLO, PUSH, SKIP, PULL, LEAVE = range(5)
"""Kinds of requests. A skip stands for a push of a non-finite gradient; nothing is applied."""


def digest(secret: str, end: str, *settings: object) -> torch.Tensor:
    """uint8 [32]: proof that an end ("worker" or "server") knows the secret, and has these settings and this protocol.

    It is the same in each connection, so it keeps out strangers, but nobody who reads the traffic.
    """
    written = repr((PROTOCOL, end, *settings)).encode()
    return torch.tensor(list(hmac.digest(secret.encode(), written, "sha256")), dtype=torch.uint8)


@dataclass(frozen=True)
class Request:
    """A worker's header."""

    kind: int
    worker: int  # -1 in the first hello, which asks for a number
    clock: int  # its steps so far
    rates: tuple[float, ...]  # learning rate of each of the optimizer's groups
    flag: bool = False  # the worker asks all workers to stop

    def send(self, connection: Connection, *body: torch.Tensor) -> int:
        """Send the header and the parts of the body (uint8). Returns the number of bytes."""
        numbers = torch.tensor([self.kind, self.worker, self.clock, self.flag], dtype=torch.int64)
        header = torch.cat([numbers.view(torch.uint8), torch.tensor(self.rates, dtype=torch.float64).view(torch.uint8)])
        for part in (header, *body):
            connection.send(part)
        return header.numel() + sum(part.numel() for part in body)

    @classmethod
    def receive(cls, connection: Connection, groups: int) -> Request:
        """Receive a header; its body comes next."""
        header = connection.receive(torch.empty(8 * (4 + groups), dtype=torch.uint8))
        kind, worker, clock, flag = header[:32].view(torch.int64).tolist()
        return cls(kind, worker, clock, tuple(header[32:].view(torch.float64).tolist()), bool(flag))


@dataclass(frozen=True)
class Answer:
    """A server's header: the worker's number and clock, and the version and fingerprint of the weights in the body."""

    worker: int
    clock: int
    version: int
    fingerprint: int
    stop: bool = False  # this push was the last, because a worker has asked all workers to stop

    NUMBERS = 5
    BYTES = 8 * NUMBERS

    def send(self, connection: Connection, body: torch.Tensor) -> None:
        """Send the header and the body (uint8)."""
        numbers = [self.worker, self.clock, self.version, self.fingerprint, self.stop]
        connection.send(torch.tensor(numbers, dtype=torch.int64))
        connection.send(body)

    @classmethod
    def receive(cls, connection: Connection) -> Answer:
        """Receive a header; its body comes next."""
        worker, clock, version, weights, stop = connection.receive(torch.empty(cls.NUMBERS, dtype=torch.int64)).tolist()
        return cls(worker, clock, version, weights, bool(stop))
