"""The messages between a worker and a server: a header of numbers, then bytes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from lightning_gradcomp.parameter_server.connection import Connection

PROTOCOL = 3
HELLO, PUSH, SKIP, PULL, LEAVE = range(5)
"""Kinds of requests. A skip stands for a push of a non-finite gradient; nothing is applied."""
ACCEPTED, REFUSED = 1, -1


def fingerprint(*agreed: object) -> int:
    """63 bits of the settings that both ends must share, and of the protocol."""
    written = repr((PROTOCOL, *agreed)).encode()
    return int.from_bytes(hashlib.sha256(written).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class Request:
    """A worker's header.

    Args:
        kind: one of the kinds above.
        worker: its number; -1 in the first hello, which asks for one.
        clock: its steps so far.
        version: version of the weights that the gradient was computed at; in a hello, the fingerprint.
        rates: learning rate of each of the optimizer's groups; empty in a hello.
        flag: True if the worker asks all workers to stop.
    """

    kind: int
    worker: int
    clock: int
    version: int
    rates: tuple[float, ...]
    flag: bool = False

    def send(self, connection: Connection, *body: torch.Tensor) -> int:
        """Send the header and the parts of the body (uint8). Returns the number of bytes."""
        numbers = torch.tensor([self.kind, self.worker, self.clock, self.version, self.flag], dtype=torch.int64)
        header = torch.cat([numbers.view(torch.uint8), torch.tensor(self.rates, dtype=torch.float64).view(torch.uint8)])
        for part in (header, *body):
            connection.send(part)
        return header.numel() + sum(part.numel() for part in body)

    @classmethod
    def receive(cls, connection: Connection, groups: int) -> Request:
        """Receive a header; its body comes next.

        Args:
            connection: connection to the worker.
            groups: number of optimizer groups.
        """
        header = connection.receive(torch.empty(8 * (5 + groups), dtype=torch.uint8))
        kind, worker, clock, version, flag = header[:40].view(torch.int64).tolist()
        return cls(kind, worker, clock, version, tuple(header[40:].view(torch.float64).tolist()), bool(flag))


@dataclass(frozen=True)
class Answer:
    """A server's header.

    Args:
        accepted: 1 if a push was accepted, 0 if not; in the answer to a hello, the worker's number or `REFUSED`.
        clock: the worker's clock.
        version, fingerprint: those of the weights in the body.
        stop: True if this push was the last, because a worker has asked all workers to stop.
    """

    accepted: int
    clock: int
    version: int
    fingerprint: int
    stop: bool = False

    BYTES = 40

    def send(self, connection: Connection, body: torch.Tensor) -> None:
        """Send the header and the body (uint8)."""
        numbers = [self.accepted, self.clock, self.version, self.fingerprint, self.stop]
        connection.send(torch.tensor(numbers, dtype=torch.int64))
        connection.send(body)

    @classmethod
    def receive(cls, connection: Connection) -> Answer:
        """Receive a header; its body comes next."""
        accepted, clock, version, weights, stop = connection.receive(torch.empty(5, dtype=torch.int64)).tolist()
        return cls(accepted, clock, version, weights, bool(stop))
