"""What lost workers and servers cost the others with dist_async: one process a worker, real signals.

    python -m benchmarks.async_faults

Four workers train a small network on images of the digits, each step with a pause that stands for computation. One of
them is killed (SIGKILL), stopped (SIGSTOP) or raises, while it pushes, while it pulls, or between two steps; then a
fifth worker joins in its place, with what the lost one remembered or without. At the end the server is killed. Printed:
seconds until the server counts the worker as gone, steps a second of the other three before and after, their longest
pause, the loss on all images when the worker was lost and at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn

import lightning_gradcomp as lgc
from benchmarks import report
from lightning_gradcomp.app.data.digits import digits
from lightning_gradcomp.parameter_server.connection import Connection, ConnectionLost

PHASES = "push", "pull", "idle"
FAULTS = "killed", "stopped", "raising"
SECRET = "word"
SILENCE = 2.0
"""Seconds without a message after which a worker counts as gone."""


def network() -> nn.Module:
    """64 pixels -> 10 classes, 21,000 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Of server and workers."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def compressor() -> lgc.Compressor:
    """Of the pushes."""
    return lgc.DGC(sparsity=0.9, min_elements=256)


def fail(how: str) -> None:
    """This process, now."""
    if how == "raising":
        raise ArithmeticError("a mistake")
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)


class Failing(Connection):
    """A connection amid whose message a worker fails: half of a push is sent, half of a pull is read."""

    how = ""

    @classmethod
    def arm(cls, averager: lgc.AsyncAverager, phase: str, how: str) -> None:
        """From the worker's next message on."""
        [connection] = averager._connections
        connection.__class__, connection.phase, cls.how = cls, phase, how  # type: ignore[attr-defined]

    def send(self, tensor: torch.Tensor) -> None:
        super().send(tensor)
        if self.phase == "push":  # type: ignore[attr-defined]  # the header is there, the body is not
            fail(self.how)

    def receive(self, tensor: torch.Tensor) -> torch.Tensor:
        got = super().receive(tensor)
        if self.phase == "pull":  # type: ignore[attr-defined]
            fail(self.how)
        return got


@dataclass(frozen=True)
class Orders:
    """What a worker is to do.

    Args:
        address: of the server.
        out: a file for its lines.
        seed: of the images that it draws.
        compute: seconds of a step's pause.
        times: shared by all: when to end, and when to fail.
        fault, phase: how and where; none: not at all.
        state: a file with what it is to remember.
    """

    address: str
    out: Path
    seed: int
    compute: float
    times: Any
    fault: str | None = None
    phase: str = ""
    state: Path | None = None


def worker(orders: Orders) -> None:
    """A process: trains, and writes a line for each step."""
    sys.stderr = orders.out.with_suffix(".log").open("w")
    torch.set_num_threads(1)
    (images, labels), model = digits()[0].tensors, network()
    options: dict[str, Any] = {"servers": [orders.address], "secret": SECRET, "world": 4}
    averager = lgc.AsyncAverager(model, sgd(model), compressor(), timeout=timedelta(seconds=20), **options)
    if orders.state:
        averager.load_state_dict(torch.load(orders.state, weights_only=True))
    generator = torch.Generator().manual_seed(orders.seed)
    with orders.out.open("w", buffering=1) as lines:
        while time.time() < orders.times[0]:
            if orders.fault and time.time() >= orders.times[1]:
                torch.save(averager.state_dict(), orders.out.with_suffix(".state"))
                print(json.dumps({"fault": time.time()}), file=lines)
                if orders.phase == "idle":
                    fail(orders.fault)
                Failing.arm(averager, orders.phase, orders.fault)
            else:
                time.sleep(orders.compute)
            chosen = torch.randint(len(images), (16,), generator=generator)
            model.zero_grad()
            nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            try:
                averager.step()
            except ConnectionLost:
                print(json.dumps({"lost": time.time()}), file=lines)
                return
            print(json.dumps({"at": time.time()}), file=lines)
    averager.close()


def serve(address: Any) -> None:
    """A server in a process of its own; it sends its address."""
    model = network()
    server = lgc.ParameterServer(model, sgd(model), compressor(), secret=SECRET)
    server.start()
    address.send(server.address)
    time.sleep(600)


class Run:
    """A server, and workers in processes of their own.

    Args:
        folder: for what workers write.
        compute: seconds of a step's pause.
        bound: the staleness.
        address: of a server elsewhere; else one is started here.
    """

    def __init__(self, folder: Path, compute: float, bound: float = math.inf, address: str = "") -> None:
        self.folder, self.compute, model = folder, compute, network()
        self.server = lgc.ParameterServer(
            model, sgd(model), compressor(), secret=SECRET, staleness=bound, timeout=timedelta(seconds=SILENCE)
        )
        self.server.start()
        self.address = address or self.server.address
        self.times = PROCESSES.Array("d", [math.inf, math.inf])
        self.processes: dict[str, Any] = {}

    def start(self, name: str, **more: Any) -> None:
        """A worker."""
        orders = Orders(self.address, self.folder / name, len(self.processes), self.compute, self.times, **more)
        self.processes[name] = PROCESSES.Process(target=worker, args=(orders,))
        self.processes[name].start()

    def loss(self) -> float:
        """Of the server's weights, on all training images."""
        (images, labels), model = digits()[0].tensors, network()
        model.load_state_dict(self.server.partition.snapshot())
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model(images), labels))

    def wait_for(self, workers: int) -> float:
        """When so many are there."""
        while len(self.server.clocks.live) != workers:
            time.sleep(0.005)
        return time.time()

    def lines(self, name: str, key: str) -> list[float]:
        """Times that a worker has written."""
        file = self.folder / name
        found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [line[key] for line in found if key in line]

    def end(self) -> None:
        """No process is left."""
        for process in self.processes.values():
            process.kill()
            process.join()
        self.server.stop()


def case(given: argparse.Namespace, phase: str, fault: str) -> dict[str, Any]:
    """One line of the table."""
    with tempfile.TemporaryDirectory() as name:
        run, with_state = Run(Path(name), given.compute_ms / 1e3, given.staleness), fault != "killed"
        try:
            stays = [f"stays {number}" for number in range(3)]
            for each in stays:
                run.start(each)
            run.start("lost", fault=fault, phase=phase)
            begin = run.wait_for(4)
            time.sleep(given.seconds)
            before, run.times[1] = run.loss(), 0.0
            gone = run.wait_for(3)
            [failed] = run.lines("lost", "fault")
            time.sleep(given.seconds)
            then = time.time()
            run.start("comes", state=run.folder / "lost.state" if with_state else None)
            joined = run.wait_for(4)
            time.sleep(given.seconds)
            end = run.times[0] = time.time()
            for each in stays:
                run.processes[each].join(60)
            times = [run.lines(each, "at") for each in stays]
            return {
                "phase": phase,
                "fault": fault,
                "noticed after, s": gone - failed,
                "steps/s before": rate(times, begin, failed),
                "after": rate(times, gone, then),
                "with a fifth": rate(times, joined, end),
                "longest pause, s": max(pause(each, failed, then) for each in times),
                "longest before": max(pause(each, begin, failed) for each in times),
                "loss when lost": before,
                "at the end": run.loss(),
                "the fifth has the state": "yes" if with_state else "no",
            }
        finally:
            run.end()


def rate(times: list[list[float]], begin: float, end: float) -> float:
    """Steps a second of a worker."""
    return mean(sum(begin <= at < end for at in each) / (end - begin) for each in times)


def pause(times: list[float], begin: float, end: float) -> float:
    """The longest between two steps, of which the later is in this time."""
    return max(b - a for a, b in pairwise(times) if begin <= b < end)


def server_killed(given: argparse.Namespace) -> str:
    """How long its workers take to notice."""
    with tempfile.TemporaryDirectory() as name:
        here, there = multiprocessing.Pipe()
        server = PROCESSES.Process(target=serve, args=(there,))
        server.start()
        run = Run(Path(name), given.compute_ms / 1e3, address=here.recv())
        try:
            names = [f"worker {number}" for number in range(4)]
            for each in names:
                run.start(each)
            while not all(run.lines(each, "at") for each in names):
                time.sleep(0.1)
            server.kill()
            killed = time.time()
            for process in run.processes.values():
                process.join(60)
            noticed = [run.lines(each, "lost")[0] - killed for each in names]
            return f"server killed: its 4 workers end with ConnectionLost, the last after {max(noticed):.2f} s"
        finally:
            server.kill()
            server.join()
            run.end()


PROCESSES = multiprocessing.get_context("forkserver")
"""Importing torch in each process would take longer than the runs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compute-ms", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=8.0, help="before the fault, after it, and with a fifth")
    parser.add_argument("--staleness", type=float, default=math.inf)
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--faults", default=",".join(FAULTS))
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for phase in given.phases.split(","):
        for fault in given.faults.split(","):
            rows.append(case(given, phase, fault))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    shown = [[f"{value:.2f}" if isinstance(value, float) else value for value in row.values()] for row in rows]
    print(report.table(list(rows[0]), shown))
    print(server_killed(given))
    print(f"staleness {given.staleness}, {report.machine()}, load {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    main()
