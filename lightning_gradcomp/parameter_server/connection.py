"""Connections between workers and a server: one TCP connection per worker, so that failures stay isolated.

A connection begins with a handshake. The server sends a nonce; the worker answers with its own nonce and a keyed digest
of both, and the server with another digest of both. This proves that each end knows the secret; a digest is valid for
one connection. All further messages are numbers and tensors, which can't run code. They are neither encrypted nor
signed: use a trusted network.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import logging
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch

from lightning_gradcomp.errors import refusal

log = logging.getLogger(__name__)

HANDSHAKE = timedelta(seconds=10)
"""How long each end waits for the other's part of the handshake."""
MOST_WAITING = 64
"""Limit on concurrent handshakes. One more ends the oldest. A worker's handshake takes one round trip."""
POLL_SECONDS = 0.02
DIGEST = "sha256"
DIGEST_BYTES = NONCE_BYTES = 32
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

    Args:
        end: the socket at this end of a TCP connection.
        peer: name of the other end in error messages.
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

    def send_bytes(self, said: bytes) -> None:
        """Send a part of the handshake."""
        with self._or_lost("handshake"):
            self._socket.sendall(said)

    def receive_bytes(self, count: int) -> bytes:
        """Receive a part of the handshake. The timeout covers all its bytes together."""
        with self._or_lost("handshake"):
            said = self._socket.recv(count, socket.MSG_WAITALL)
            if len(said) < count:
                raise ConnectionResetError(f"it sent {len(said)} of {count} bytes")
        return said

    def shut_down(self) -> None:
        """Interrupt a call of `send` or `receive` in another thread."""
        with suppress(OSError):  # the other end may have closed it
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, even if a forked process has a copy of the socket."""
        self.shut_down()
        self._socket.close()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


def digest(secret: str, end: str, nonces: bytes) -> bytes:
    """Proof that an end ("worker" or "server") of the connection with these nonces knows the secret."""
    return hmac.digest(secret.encode(), end.encode() + nonces, DIGEST)


class Listener:
    """Accepts the connections of workers.

    Args:
        host: address or name of the interface to listen on; workers must be able to reach it.
        port: port to listen on; 0 picks a free one.
        secret: a word that workers must know.
        timeout: timeout of the connections.

    Raises:
        ValueError: if the secret is empty, or the address is not one of this machine's.
        OSError: if the port is in use.
    """

    def __init__(self, host: str, port: int, secret: str, timeout: timedelta) -> None:
        if not secret:
            raise refusal("secret", secret, "a word that workers must know")
        self._secret, self._timeout = secret, timeout
        self._socket = listening(host, port)
        self._socket.settimeout(POLL_SECONDS)
        found, number, *_ = self._socket.getsockname()
        self.address = f"[{found}]:{number}" if ":" in found else f"{found}:{number}"
        """HOST:PORT."""
        self._waiting: list[Connection] = []
        self._lock = threading.Lock()

    def accept(self) -> Connection | None:
        """A new connection, from a worker or a stranger; None if there is none now. Call from one thread only."""
        try:
            end, (host, port, *_) = self._socket.accept()
            connection = Connection(end, f"the worker at {host} port {port}")
        except TimeoutError:
            return None
        except OSError as error:  # too many open files, or the other end has already left
            log.warning(f"parameter server {self.address}: accepting: {cause(error)}")
            time.sleep(POLL_SECONDS)
            return None
        with self._lock:
            self._waiting.append(connection)
            if len(self._waiting) > MOST_WAITING:
                self._waiting.pop(0).shut_down()
        return connection

    def admit(self, connection: Connection) -> None:
        """Perform the handshake. Blocking; call from any thread.

        Raises ConnectionLost if the other end does not know the secret, or does not answer in time.
        """
        try:
            nonce = secrets.token_bytes(NONCE_BYTES)
            connection.send_bytes(nonce)
            said = connection.receive_bytes(NONCE_BYTES + DIGEST_BYTES)
            nonces = nonce + said[:NONCE_BYTES]
            known = hmac.compare_digest(said[NONCE_BYTES:], digest(self._secret, "worker", nonces))
            connection.send_bytes(digest(self._secret, "server", nonces) if known else bytes(DIGEST_BYTES))
        finally:
            with self._lock:
                if connection in self._waiting:
                    self._waiting.remove(connection)
        if not known:
            raise ConnectionLost(f"handshake: {connection.peer} does not know the secret")
        connection.set_timeout(self._timeout)

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


def connect(address: str, secret: str, timeout: timedelta) -> Connection:
    """Connect to the server at HOST:PORT.

    Raises:
        ValueError: if the address is malformed, or the secret is not the server's.
        ConnectionLost: if nobody answers.
    """
    place = host_and_port(address)
    try:
        end = socket.create_connection(place, HANDSHAKE.total_seconds())
    except OSError as error:
        raise ConnectionLost(f"connecting: lost the server at {address}: {cause(error)}") from error
    connection = Connection(end, f"the server at {address}")
    try:
        own = secrets.token_bytes(NONCE_BYTES)
        nonces = connection.receive_bytes(NONCE_BYTES) + own
        connection.send_bytes(own + digest(secret, "worker", nonces))
        if not hmac.compare_digest(connection.receive_bytes(DIGEST_BYTES), digest(secret, "server", nonces)):
            raise refusal("secret", "one that the server does not know", "the server's")
        connection.set_timeout(timeout)
    except BaseException:
        connection.close()
        raise
    return connection
