"""Connections between workers and a server: one TCP connection per worker, so that failures stay isolated.

All messages are numbers and tensors, which can't run code. They are neither encrypted nor signed: use a trusted
network.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch

from lightning_gradcomp.errors import refusal

log = logging.getLogger(__name__)

HANDSHAKE = timedelta(seconds=10)
"""How long each end waits for the other's part of the handshake (`messages.digest`)."""
POLL_SECONDS = 0.02
ADDRESS = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<name>[^:\[\]]+)):(?P<port>\d{1,5})")


class ConnectionLost(RuntimeError):
    """The other end of a connection can't be reached."""


def cause(error: OSError) -> str:
    """The reason, in a few words."""
    return error.strerror or str(error)


def host_and_port(address: str) -> tuple[str, int]:
    """Split HOST:PORT. Raises ValueError if the address is malformed."""
    found = ADDRESS.fullmatch(address)
    if not found or int(found["port"]) > 65535:
        raise refusal("address of a server", address, "HOST:PORT, with an IPv6 host in brackets: [::1]:29600")
    return found["v6"] or found["name"], int(found["port"])


class Connection:
    """Sends tensors to another process and receives tensors from it. Blocking; use from one thread at a time.

    Error messages name the other end `peer`.
    """

    def __init__(self, end: socket.socket, peer: str) -> None:
        self._socket, self.peer = end, peer
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a header does not wait for its body
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # detects a dead machine
        self.set_timeout(HANDSHAKE)

    def set_timeout(self, timeout: timedelta) -> None:
        """Limit how long the other end may neither accept nor send a byte.

        The kernel enforces it, so a whole tensor travels in one call, without the GIL.
        """
        self._socket.settimeout(None)
        self._timeout = timeout
        limit = struct.pack("ll", int(timeout.total_seconds()), timeout.microseconds)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)

    @contextmanager
    def _or_lost(self, doing: str) -> Iterator[None]:
        try:
            yield
        except BlockingIOError as error:
            seconds = self._timeout.total_seconds()
            raise ConnectionLost(f"{doing}: lost {self.peer}: no sign of it for {seconds:g} s") from error
        except OSError as error:
            raise ConnectionLost(f"{doing}: lost {self.peer}: {cause(error)}") from error

    def send(self, tensor: torch.Tensor) -> None:
        """Send a CPU tensor [n]. The other end knows its shape and dtype."""
        with self._or_lost("sending"):
            self._socket.sendall(_bytes_of(tensor.contiguous()))

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill a contiguous CPU tensor [n] and return it."""
        rest = _bytes_of(tensor)
        with self._or_lost("receiving"):
            while rest:
                count = self._socket.recv_into(rest, flags=socket.MSG_WAITALL)
                if not count:
                    raise ConnectionResetError("it closed the connection")
                rest = rest[count:]
        return tensor

    def close(self) -> None:
        """End the connection, even if a forked process has a copy of the socket."""
        with suppress(OSError):  # the other end may have closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


class Listener:
    """Accepts the connections of workers."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = listening(host, port)
        self._socket.settimeout(POLL_SECONDS)
        found, number, *_ = self._socket.getsockname()
        self.address = f"[{found}]:{number}" if ":" in found else f"{found}:{number}"
        """HOST:PORT."""

    def accept(self) -> Connection | None:
        """A new connection, from a worker or a stranger; None if there is none now."""
        try:
            end, (host, port, *_) = self._socket.accept()
            return Connection(end, f"the worker at {host} port {port}")
        except TimeoutError:
            return None
        except OSError as error:  # too many open files, or the other end has already left
            log.warning(f"parameter server {self.address}: accepting: {cause(error)}")
            time.sleep(POLL_SECONDS)
            return None

    def close(self) -> None:
        """Stop listening. Connections stay open."""
        self._socket.close()


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens on this address of this machine, IPv4 or IPv6."""
    allowed = "that of one of this machine's interfaces"
    try:
        family, _, _, _, (found, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if ipaddress.ip_address(found).is_unspecified:  # not an address for workers
            raise refusal("address of a server", host, allowed)
        return socket.create_server((found, port), family=family)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise refusal("address of a server", host, allowed) from error
        raise


def connect(address: str) -> Connection:
    """Connect to the server at HOST:PORT."""
    place = host_and_port(address)
    try:
        return Connection(socket.create_connection(place, HANDSHAKE.total_seconds()), f"the server at {address}")
    except OSError as error:
        raise ConnectionLost(f"connecting: lost the server at {address}: {cause(error)}") from error
