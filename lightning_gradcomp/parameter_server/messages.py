"""What a worker and a server tell each other: a header of numbers, then bytes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from lightning_gradcomp.parameter_server.connection import Connection

PROTOCOL = 3
HELLO, PUSH, SKIP, PULL, LEAVE = range(5)
"""Kinds of requests. A skip is a push of nothing: the worker's gradient was not finite."""
ACCEPTED, REFUSED = 1, -1


def fingerprint(*said: object) -> int:
    """63 bits of what both ends have to agree on, and of the protocol."""
    written = repr((PROTOCOL, *said)).encode()
    return int.from_bytes(hashlib.sha256(written).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class Request:
    """A worker's header.

    Args:
        kind: one of the kinds.
        worker: its number; -1 in the first hello, which asks for one.
        clock: its steps so far.
        version: of the weights that the gradient is of; in a hello, the fingerprint of model and compressors.
        rates: learning rate of each of the optimizer's groups; none in a hello.
        flag: whether the worker asks all to stop.
    """

    kind: int
    worker: int
    clock: int
    version: int
    rates: tuple[float, ...]
    flag: bool = False

    @property
    def skip(self) -> bool:
        """Whether it is a skip."""
        return self.kind == SKIP

    def send(self, connection: Connection, *body: torch.Tensor) -> int:
        """Sends it, and then the parts of its body (uint8). Returns the bytes of all."""
        numbers = torch.tensor([self.kind, self.worker, self.clock, self.version, self.flag], dtype=torch.int64)
        header = torch.cat([numbers.view(torch.uint8), torch.tensor(self.rates, dtype=torch.float64).view(torch.uint8)])
        for part in (header, *body):
            connection.send(part)
        return header.numel() + sum(part.numel() for part in body)

    @classmethod
    def receive(cls, connection: Connection, groups: int) -> Request:
        """The header; its body is to be received next."""
        header = connection.receive(torch.empty(8 * (5 + groups), dtype=torch.uint8))
        kind, worker, clock, version, flag = header[:40].view(torch.int64).tolist()
        return cls(kind, worker, clock, version, tuple(header[40:].view(torch.float64).tolist()), bool(flag))


@dataclass(frozen=True)
class Answer:
    """A server's header.

    Args:
        accepted: whether a push counts; in the answer to a hello, the worker's number, or `REFUSED`.
        clock: the worker's.
        version, fingerprint: of the weights in the body.
        stop: whether this push was the last, since a worker asks all to stop.
    """

    accepted: int
    clock: int
    version: int
    fingerprint: int
    stop: bool = False

    BYTES = 40

    def send(self, connection: Connection, body: torch.Tensor) -> None:
        """Sends it, and then the body (uint8)."""
        numbers = [self.accepted, self.clock, self.version, self.fingerprint, self.stop]
        connection.send(torch.tensor(numbers, dtype=torch.int64))
        connection.send(body)

    @classmethod
    def receive(cls, connection: Connection) -> Answer:
        """The header; its body is to be received next."""
        accepted, clock, version, weights, stop = connection.receive(torch.empty(5, dtype=torch.int64)).tolist()
        return cls(accepted, clock, version, weights, bool(stop))
