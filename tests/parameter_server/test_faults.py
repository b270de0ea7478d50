"""A worker that is killed, hangs or raises costs the others nothing but a wait; without a server they end."""

import time
from datetime import timedelta
from pathlib import Path

import pytest

from lightning_gradcomp.parameter_server.averager import AsyncAverager
from lightning_gradcomp.parameter_server.connection import ConnectionLost
from tests.parameter_server.conftest import SECRET, dgc, loss, net, sgd
from tests.processes import Forked

SCRIPT = str(Path(__file__).with_name("worker_script.py"))
LIMIT = 40


@pytest.fixture
def start(tmp_path):
    """Starts a script of `worker_script.py`; returns it, and a function that waits for a number of its lines."""
    running = []

    def begin(*words):
        lines = tmp_path / str(len(running))
        lines.touch()
        script = Forked(SCRIPT, str(lines), *words)
        running.append(script)

        def wait_for(number):
            end = time.monotonic() + LIMIT
            while len(found := lines.read_text().splitlines()) < number:
                assert time.monotonic() < end, f"{words}: {found} {script.output}"
                time.sleep(0.02)
            return found

        return script, wait_for

    yield begin
    for script in running:
        script.kill()
        script.end()


def push(model, averager, steps):
    for step in range(steps):
        model.zero_grad()
        loss(model, 0, step).backward()
        averager.step()


@pytest.mark.parametrize("fault", ["killed", "raise", "stop"])
def test_a_lost_worker_is_waited_for_no_longer(job, start, fault):
    running = job(dgc(), staleness=1, silence=timedelta(seconds=3))
    other, wait_for = start("worker", running.servers[0].address, "none" if fault == "killed" else fault)
    wait_for(3)
    if fault == "killed":
        other.kill()
    model, averager = running.worker()
    begin = time.monotonic()
    push(model, averager, 8)  # with a bound of 1 the lost one would hold it up
    assert time.monotonic() - begin < LIMIT
    push(*running.worker(), 1)


def test_without_a_server_a_worker_ends(start):
    server, wait_for = start("server")
    [address] = wait_for(1)
    model = net(1)
    averager = AsyncAverager(model, sgd(model), dgc(), servers=[address], secret=SECRET)
    push(model, averager, 2)
    kept = averager.state_dict()["memory"]["velocity"]
    server.kill()
    server.end()
    with pytest.raises(ConnectionLost, match=f"lost the server at {address}"):
        push(model, averager, 3)
    after = averager.state_dict()["memory"]["velocity"]
    assert all(kept[name].equal(part) for name, part in after.items())  # for another server
    averager.close()
    with pytest.raises(ConnectionLost, match=f"lost the server at {address}"):
        AsyncAverager(model, sgd(model), dgc(), servers=[address], secret=SECRET)
