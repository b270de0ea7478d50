"""Who gets a connection to a server, and at which addresses."""

import socket
import struct
import threading
import time
from datetime import timedelta

import pytest

from lightning_gradcomp.parameter_server import connection
from lightning_gradcomp.parameter_server.averager import AsyncAverager
from lightning_gradcomp.parameter_server.connection import HANDSHAKE, ConnectionLost, Listener, host_and_port
from lightning_gradcomp.parameter_server.messages import DIGEST_BYTES, digest
from tests.parameter_server.conftest import SECRET, loss, net, sgd


@pytest.fixture
def stranger():
    """Connects to a server, without its secret."""
    opened = []

    def dial(server):
        opened.append(socket.create_connection(host_and_port(server.address), 5))
        return opened[-1]

    yield dial
    for end in opened:
        end.close()


def push(model, averager):
    loss(model, 0, 0).backward()
    averager.step()


def received(end):
    """All that the other end sends until it ends the connection."""
    said = b""
    try:
        while more := end.recv(4096):
            said += more
    except ConnectionResetError:  # it had not read all
        pass
    return said


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", "reflected"])
def test_a_server_that_does_not_know_the_secret_is_refused(answer):
    """It may also send the worker's digest back."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve():
            end, _ = other.accept()
            said = end.recv(DIGEST_BYTES, socket.MSG_WAITALL)
            end.sendall(said if answer == "reflected" else answer)
            end.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises((ValueError, ConnectionLost), match=r"^secret, model, .*|it closed the connection"):
            AsyncAverager(net(), sgd(net()), servers=[f"127.0.0.1:{other.getsockname()[1]}"], secret=SECRET)
        thread.join()


RESET = struct.pack("ii", 1, 0)
STRANGERS = {
    "leaves": lambda end: end.close(),
    "resets": lambda end: (end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET), end.close()),
    "says too little": lambda end: (end.sendall(b"no number"), end.shutdown(socket.SHUT_WR)),
    "has another key": lambda end: end.sendall(digest("another", "worker").numpy().tobytes()),
    "speaks HTTP": lambda end: end.sendall(
        b"GET / HTTP/1.1\r\nHost: 10.0.0.1:29600\r\nUser-Agent: a scanner of ports\r\nAccept: */*\r\n\r\n"
    ),
    "says much": lambda end: end.sendall(bytes(range(256)) * 4096),
}


@pytest.mark.parametrize("act", STRANGERS.values(), ids=STRANGERS)
def test_strangers_trouble_nobody(job, stranger, act):
    running = job(staleness=0)
    end = stranger(*running.servers)
    act(end)
    worker = running.worker()
    if end.fileno() >= 0:
        assert not received(end).strip(b"\0")  # no digest; the server ends the connection
    for _ in range(2):
        push(*worker)  # in lock step with nobody


def test_silent_strangers_delay_nobody(job, stranger):
    running, begin = job(), time.monotonic()
    for _ in range(70):
        stranger(*running.servers)
    push(*running.worker())
    assert time.monotonic() - begin < HANDSHAKE.total_seconds() / 2


def test_the_server_ends_a_connection_without_a_handshake(job, stranger, monkeypatch):
    monkeypatch.setattr(connection, "HANDSHAKE", timedelta(seconds=0.2))
    end = stranger(*job().servers)
    assert received(end) == b""


def test_a_server_that_says_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(connection, "HANDSHAKE", timedelta(seconds=0.2))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConnectionLost, match=rf"lost the server at {address}: no sign of it for 0\.2 s"):
            AsyncAverager(net(), sgd(net()), servers=[address], secret=SECRET)


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", pytest.param("::1", marks=ipv6)])
def test_servers_at_other_addresses(job, host):
    running = job(servers=2, host=host)
    if host == "::1":
        assert running.servers[0].address.startswith("[::1]:")
    push(*running.worker())
    assert [server.partition.version for server in running.servers] == [1, 1]


@pytest.mark.parametrize("address", ["nowhere", "::1:29600", "[::1]", "[]:1", "host:", "host:70000", "host:-1"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ValueError, match=r"^address of a server: got '.*', allowed: HOST:PORT, with an IPv6 host in"):
        AsyncAverager(net(), sgd(net()), servers=[address], secret=SECRET)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "no.such.host.invalid", pytest.param("::", marks=ipv6)])
def test_an_address_that_is_no_interface_s_is_refused(host):
    with pytest.raises(ValueError, match=rf"^address of a server: got '{host}', allowed: that of one of this"):
        Listener(host, 0)


def test_a_server_that_stops_frees_its_port(job):
    running = job()
    _, averager = running.worker()
    running.stop()
    port = host_and_port(running.servers[0].address)[1]
    Listener("127.0.0.1", port).close()
    assert not averager.connected


def test_a_worker_that_has_left_says_so(job):
    model, averager = job().worker()
    push(model, averager)
    averager.close()
    averager.close()
    for name in ("step", "pull"):
        with pytest.raises(RuntimeError, match=rf"AsyncAverager: {name}\(\) after close\(\)"):
            getattr(averager, name)()
    assert averager.state_dict()["steps"] == averager.version == 1


def test_a_server_that_has_stopped_does_not_start(job):
    running = job()
    running.stop()
    with pytest.raises(RuntimeError, match=r"start\(\) after stop\(\)"):
        running.servers[0].start()
