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
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
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


def worker(arguments: argparse.Namespace) -> None:
    """A process: trains, and writes a line for each step."""
    torch.set_num_threads(1)
    (images, labels), model = digits()[0].tensors, network()
    averager = lgc.AsyncAverager(
        model, sgd(model), compressor(), servers=[arguments.address], secret=SECRET, world=4,
        timeout=timedelta(seconds=20),
    )  # fmt: skip
    if arguments.state:
        averager.load_state_dict(torch.load(arguments.state, weights_only=True))
    generator = torch.Generator().manual_seed(arguments.seed)
    steps = 0
    with open(arguments.out, "w", buffering=1) as lines:
        while time.time() < arguments.until:
            if arguments.fault and time.time() >= arguments.fault_at:
                torch.save(averager.state_dict(), f"{arguments.out}.state")
                print(json.dumps({"fault": time.time()}), file=lines)
                if arguments.phase == "idle":
                    fail(arguments.fault)
                Failing.arm(averager, arguments.phase, arguments.fault)
            time.sleep(arguments.compute_ms / 1e3)
            chosen = torch.randint(len(images), (16,), generator=generator)
            model.zero_grad()
            nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            try:
                averager.step()
            except ConnectionLost:
                print(json.dumps({"lost": time.time()}), file=lines)
                os._exit(3)
            steps += 1
            print(json.dumps({"at": time.time()}), file=lines)
    averager.close()


class Run:
    """A server in this process or one of its own, and workers in processes.

    Args:
        arguments: those of the command line.
        folder: for what workers write.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path, bound: float) -> None:
        self.arguments, self.folder, model = arguments, folder, network()
        self.server = lgc.ParameterServer(
            model, sgd(model), compressor(), secret=SECRET, staleness=bound, timeout=timedelta(seconds=SILENCE)
        )
        self.server.start()
        self.images, self.labels = digits()[0].tensors
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, until: float, *more: str, address: str = "") -> None:
        """A worker."""
        given = self.arguments
        words = ["--address", address or self.server.address, "--until", str(until), "--out", str(self.folder / name)]
        words += ["--seed", str(len(self.processes)), "--compute-ms", str(given.compute_ms), *more]
        command = [sys.executable, "-m", "benchmarks.async_faults", *words]
        with open(self.folder / f"{name}.log", "w") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def loss(self) -> float:
        """Of the server's weights, on all training images."""
        model = network()
        model.load_state_dict(self.server.shard.snapshot())
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model(self.images), self.labels))

    def wait_for(self, workers: int) -> float:
        """When so many are there."""
        while len(self.server.clocks.live) != workers:
            time.sleep(0.01)
        return time.time()

    def lines(self, name: str, key: str) -> list[float]:
        """Times that a worker has written."""
        found = [json.loads(line) for line in (self.folder / name).read_text().splitlines()]
        return [line[key] for line in found if key in line]

    def end(self) -> None:
        """No process is left."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.server.stop()


def case(arguments: argparse.Namespace, phase: str, fault: str, bound: float, with_state: bool) -> dict[str, Any]:
    """One line of the table."""
    with tempfile.TemporaryDirectory() as name:
        run, third = Run(arguments, Path(name), bound), arguments.seconds
        try:
            begin = time.time() + arguments.warm_up  # processes take a while to start
            until, at = begin + 3 * third, begin + third
            for number in range(3):
                run.start(f"stays {number}", until)
            run.start("lost", until, "--fault", fault, "--phase", phase, "--fault-at", str(at))
            run.wait_for(4)
            time.sleep(max(0.0, begin - time.time()))
            time.sleep(max(0.0, at - time.time()))
            before = run.loss()
            gone = run.wait_for(3)
            [failed] = run.lines("lost", "fault")
            time.sleep(max(0.0, begin + 2 * third - time.time()))
            state = ["--state", str(run.folder / "lost.state")] if with_state else []
            run.start("comes", until, *state)
            joined = run.wait_for(4)
            for number in range(3):
                run.processes[f"stays {number}"].wait(3 * third + 60)
            times = [run.lines(f"stays {number}", "at") for number in range(3)]
            return {
                "phase": phase,
                "fault": fault,
                "noticed after, s": gone - failed,
                "steps/s before": rate(times, begin, failed),
                "after": rate(times, max(gone, failed), joined),
                "with the fifth": rate(times, joined, until),
                "longest pause, s": max(pause(each, failed) for each in times),
                "loss then": before,
                "at the end": run.loss(),
            }
        finally:
            run.end()


def rate(times: list[list[float]], begin: float, end: float) -> float:
    """Steps a second of a worker."""
    return mean(sum(begin <= at < end for at in each) / (end - begin) for each in times)


def pause(times: list[float], failed: float) -> float:
    """The longest between two steps of which the later is after the fault."""
    return max(b - a for a, b in zip(times, times[1:], strict=False) if b >= failed)


def server_killed(arguments: argparse.Namespace) -> str:
    """The time until its workers notice that their server is gone."""
    with tempfile.TemporaryDirectory() as name:
        run = Run(arguments, Path(name), math.inf)
        command = [sys.executable, "-m", "benchmarks.async_faults", "--serve"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            for number in range(4):
                run.start(f"worker {number}", time.time() + 600, address=address)
            names = list(run.processes)
            while not all((run.folder / each).exists() and run.lines(each, "at") for each in names):
                time.sleep(0.1)
            server.kill()
            killed = time.time()
            codes = [process.wait(60) for process in run.processes.values()]
            noticed = [run.lines(each, "lost")[0] - killed for each in names]
            return f"server killed: 4 workers end with ConnectionLost ({codes}) after {max(noticed):.2f} s at most"
        finally:
            server.kill()
            server.wait()
            run.end()


def serve() -> None:
    """A server in a process of its own."""
    model = network()
    server = lgc.ParameterServer(model, sgd(model), compressor(), secret=SECRET)
    server.start()
    print(server.address, flush=True)
    time.sleep(600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compute-ms", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=6.0, help="before, after, and with the fifth worker")
    parser.add_argument("--warm-up", type=float, default=15.0, help="until all processes train")
    parser.add_argument("--staleness", type=float, default=math.inf)
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--faults", default=",".join(FAULTS))
    for option in ("--address", "--out", "--fault", "--phase", "--state"):
        parser.add_argument(option, help="for the processes, which this script starts itself")
    parser.add_argument("--until", type=float)
    parser.add_argument("--fault-at", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--serve", action="store_true")
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    if arguments.address:
        worker(arguments)
        return
    rows: list[dict[str, Any]] = []
    for phase in arguments.phases.split(","):
        for fault in arguments.faults.split(","):
            with_state = fault != "killed"
            rows.append({**case(arguments, phase, fault, arguments.staleness, with_state), "fifth": with_state})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(report.table(list(rows[0]), [[shown(value) for value in row.values()] for row in rows]))
    print(server_killed(arguments))
    print(f"{report.machine()}, load {os.getloadavg()[0]:.0f}, staleness {arguments.staleness}")


def shown(value: object) -> str:
    """In a table."""
    if isinstance(value, bool):
        return "with its state" if value else "without"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
