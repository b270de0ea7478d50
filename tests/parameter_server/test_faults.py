"""A worker that is killed, hangs or raises costs the others nothing but a wait; without a server they end."""

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from lightning_gradcomp.parameter_server.averager import AsyncAverager
from lightning_gradcomp.parameter_server.connection import ConnectionLost
from tests.parameter_server.conftest import SECRET, dgc, loss, net, sgd

SCRIPT = str(Path(__file__).with_name("worker_script.py"))
LIMIT = 40


@pytest.fixture
def start():
    running = []

    def begin(*words):
        command = [sys.executable, SCRIPT, *words]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def push(model, averager, steps):
    for step in range(steps):
        model.zero_grad()
        loss(model, 0, step).backward()
        averager.step()


@pytest.mark.parametrize("fault", ["killed", "raise", "stop"])
def test_a_lost_worker_is_waited_for_no_longer(job, start, fault):
    running = job(dgc(), staleness=1, silence=timedelta(seconds=3))
    (server,) = running.servers
    other = start("worker", server.address, "none" if fault == "killed" else fault)
    for _ in range(3):
        assert other.stdout.readline().startswith("pushed")
    if fault == "killed":
        other.kill()
    model, averager = running.worker()
    begin = time.monotonic()
    push(model, averager, 8)  # with a bound of 1 the lost one would hold it up
    assert time.monotonic() - begin < LIMIT
    assert list(server.clocks.live) == [averager.worker]
    late = running.worker()
    push(*late, 1)
    assert len(server.clocks.live) == 2


def test_without_a_server_a_worker_ends(start):
    server = start("server")
    address = server.stdout.readline().strip()
    model = net(1)
    averager = AsyncAverager(model, sgd(model), dgc(), servers=[address], secret=SECRET)
    push(model, averager, 2)
    kept = averager.state_dict()["memory"]["velocity"]
    server.kill()
    server.wait()
    with pytest.raises(ConnectionLost, match=f"lost the server at {address}"):
        push(model, averager, 3)
    after = averager.state_dict()["memory"]["velocity"]
    assert all(kept[name].equal(part) for name, part in after.items())  # for another server
    with pytest.raises(ConnectionLost, match=f"lost the server at {address}"):
        AsyncAverager(model, sgd(model), dgc(), servers=[address], secret=SECRET)
