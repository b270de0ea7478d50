"""Connections between a worker and a server: a process group of two each, so that a failure is that connection's alone.

Workers find a server by its store (host and port), write a keyed digest there, and both then connect under a prefix of
their own. Numbers and tensors travel, and nothing that could run code. Without the secret nobody gets a connection; the
store itself, with addresses and digests, is open to all who reach the port: bind it to a network that you trust.
"""

from __future__ import annotations

import hmac
import re
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_gradcomp.errors import refusal

HANDSHAKE_SECONDS = 10.0
"""How long either side waits for the other while they connect."""
POLL_SECONDS = 0.02


class ConnectionLost(RuntimeError):
    """The other end of a connection can't be reached."""


def cause(error: Exception) -> str:
    """What went wrong, in a line; gloo's messages begin with a file of its own and end with advice."""
    return re.sub(r"^\[\S+\] ", "", str(error).splitlines()[0]).partition(". ")[0]


def interface(host: str) -> Any:
    """gloo's device for the interface with the address `host`.

    Raises:
        ValueError: there is none, as for 0.0.0.0.
    """
    gloo: Any = dist.ProcessGroupGloo
    try:
        return gloo.create_device(hostname=host)
    except RuntimeError as error:
        raise refusal("address of a server", host, "that of one of this machine's interfaces") from error


class Connection:
    """Two processes that send each other tensors. Blocking; one thread at a time.

    Args:
        store: of this connection alone.
        rank: 0 for the server, 1 for the worker.
        host: the address of the interface that is used.
        timeout: how long a transfer may take, and how long to wait for the other's next message.
        peer: what to call the other end in errors.
    """

    def __init__(self, store: Any, rank: int, host: str, timeout: timedelta, peer: str) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [interface(host)]
        self._other, self._peer = 1 - rank, peer
        self._group: Any = self._do("connecting", lambda: gloo(store, rank, 2, options))

    def _do(self, doing: str, call: Any) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise ConnectionLost(f"{doing}: lost {self._peer}: {cause(error)}") from error

    def send(self, tensor: torch.Tensor) -> None:
        """Sends a CPU tensor whose shape and dtype the other end knows; an empty one does not travel."""
        if tensor.numel():
            self._do("sending", lambda: self._group.send([tensor.contiguous()], self._other, 0).wait())

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fills `tensor`."""
        if tensor.numel():
            self._do("receiving", lambda: self._group.recv([tensor], self._other, 0).wait())
        return tensor


def digest(secret: str, number: int) -> str:
    """What shows that who asks for connection `number` knows the secret."""
    return hmac.new(secret.encode(), f"connection {number}".encode(), "sha256").hexdigest()


class Listener:
    """Where workers find a server.

    Args:
        host: the address of the interface to listen on, one that workers reach.
        port: 0 is any.
        secret: what workers must know.
        timeout: of connections.
    """

    def __init__(self, host: str, port: int, secret: str, timeout: timedelta) -> None:
        if not secret:
            raise refusal("secret", secret, "a word that workers have to know")
        interface(host)  # raises
        listening = socket.create_server((host, port))
        self._host, self._secret, self._timeout = host, secret, timeout
        self.address = f"{host}:{listening.getsockname()[1]}"
        """HOST:PORT."""
        self._store = dist.TCPStore(
            host,
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
            timeout=timedelta(seconds=HANDSHAKE_SECONDS),
        )
        self._asked = 0
        self._pending: dict[int, float] = {}
        """Number of a connection that was asked for -> until when its digest is waited for."""

    def poll(self) -> int | None:
        """The number of a worker that knows the secret and waits for its connection; None if there is none just now.

        To be called from one thread.
        """
        if self._store.add("asked", 0) > self._asked:
            self._asked += 1
            self._pending[self._asked] = time.monotonic() + HANDSHAKE_SECONDS
        for number, deadline in list(self._pending.items()):
            said = self._store.check([f"digest/{number}"])
            if not said and time.monotonic() < deadline:
                continue  # it comes a round trip later
            del self._pending[number]
            known = said and hmac.compare_digest(
                self._store.get(f"digest/{number}"), digest(self._secret, number).encode()
            )
            self._store.set(f"answer/{number}", "welcome" if known else "refused")
            if known:
                return number
        time.sleep(POLL_SECONDS)
        return None

    def connect(self, number: int) -> Connection:
        """The connection with this worker. Blocking; in any thread."""
        store = dist.PrefixStore(f"connection/{number}", self._store)
        return Connection(store, 0, self._host, self._timeout, f"worker of connection {number}")


def connect(address: str, secret: str, timeout: timedelta) -> Connection:
    """A connection to the server at HOST:PORT.

    Raises:
        ValueError: an address of another form; a secret that is not the server's.
        ConnectionLost: nobody answers.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise refusal("address of a server", address, "HOST:PORT")
    try:
        with socket.create_connection((host, int(port)), HANDSHAKE_SECONDS) as probe:
            own = probe.getsockname()[0]  # of the interface from which the server is reached
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=HANDSHAKE_SECONDS))
        number = store.add("asked", 1)
        store.set(f"digest/{number}", digest(secret, number))
        answer = store.get(f"answer/{number}")
    except (OSError, RuntimeError) as error:
        raise ConnectionLost(f"connecting: lost the server at {address}: {cause(error)}") from error
    if answer != b"welcome":
        raise refusal("secret", "one that the server does not know", "the server's")
    return Connection(dist.PrefixStore(f"connection/{number}", store), 1, own, timeout, f"the server at {address}")
