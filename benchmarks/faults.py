"""What happens to the others when a rank, worker or server is lost: when they notice, and how they continue.

    python -m benchmarks.faults ranks      # strategies: 112 cases, about 45 minutes of two cores
    python -m benchmarks.faults ranks --faults stopped --phases round
    python -m benchmarks.faults async      # dist_async: 9 cases and a killed server, about eight minutes

- ranks: one of a Trainer's two ranks is killed, stopped, raises or is cut off in a phase of the run. The output is the
  seconds until the other ended, and its message. The strategy's timeout is 8 s once both have started; a case is ended
  after `--limit` seconds. Only ranks on two emulated nodes (benchmarks/link.py, needs root) are cut off: one stops
  sending packets, including acknowledgements.
- async: four workers train a small network on the digits, with a pause in each step that stands for computation. One
  fails between steps, or during a push or a pull; later a fifth joins. The output is the other three's steps per second
  before and after, their longest pause between two steps, and the final accuracy. They wait at most the server's
  timeout of 2 s for a silent worker; the staleness is 4.

Private: torch's `_set_pg_timeout` and Lightning's `_timeout`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import mean
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_gradcomp as lgc
from benchmarks import report
from benchmarks.link import emulated, local
from lightning_gradcomp.app.data.digits import digits

FAULTS = {
    "ranks": ("killed", "stopped", "raises", "cut off"),
    "async": ("killed", "stopped", "raises"),
}
PHASES = {
    "ranks": (
        "train start", "dense step", "trial", "compressed step", "round", "checkpoint", "sidecar", "validation",
    ),
    "async": ("step", "push", "pull"),
}  # fmt: skip


def fail(how: str) -> None:
    """Make this process fail now."""
    if how == "raises":
        raise ArithmeticError("a mistake")
    if how == "cut off":  # no packet fits into a burst of 10 bytes
        words = "tc qdisc replace dev eth0 root tbf rate 1kbit burst 10 latency 1ms"
        subprocess.run(words.split(), check=True)
        return
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)


# Ranks of a Trainer


TIMEOUT = 8.0


def rank(how: str, failing: str, phase: str, folder: str) -> None:
    """One rank of a case."""

    def fault(here: str) -> None:
        if here == phase and dist.get_rank() == int(failing):
            Path(folder, "fault").write_text(str(time.time()))
            fail(how)

    class Files(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            if "token" in checkpoint:
                fault("sidecar")
            super().save_checkpoint(checkpoint, path, storage_options)

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

        def setup(self, stage: str) -> None:
            Path(folder, f"rank{dist.get_rank()}").write_text(str(os.getpid()))
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT))
            self.trainer.strategy._timeout = timedelta(seconds=TIMEOUT)

        def on_train_start(self) -> None:
            fault("train start")

        def training_step(self, batch, index):
            if self.trainer.global_step == (15 if phase == "trial" else 9):  # 15: the first compressed ones are timed
                fault(phase if "step" in phase or phase in ("round", "trial") else "")
            images, labels = batch
            return nn.functional.cross_entropy(self.layers(images), labels)

        def on_save_checkpoint(self, checkpoint) -> None:
            fault("checkpoint")

        def validation_step(self, batch, index) -> None:
            fault("validation")
            self.log("loss", self.layers(batch[0]).mean(), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    patience = timedelta(seconds=60)  # for both ranks to start
    if phase == "round":  # at step 9 a round is being exchanged
        strategy = lgc.DelayedStrategy(period=4, delay=3, timeout=patience)
    else:
        compressor = lgc.NoCompression() if phase == "dense step" else lgc.DGC()
        state = "sidecar" if phase == "sidecar" else "gather"
        topology = "auto" if phase == "trial" else "all_gather"
        strategy = lgc.CompressedDDPStrategy(compressor, topology, checkpoint_state=state, timeout=patience)
    apart = how == "cut off"
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=1 if apart else 2, num_nodes=2 if apart else 1,
        max_epochs=3, logger=False, enable_progress_bar=False, enable_model_summary=False, plugins=[Files()],
        num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(folder, "last", every_n_train_steps=12, enable_version_counter=False)],
    )  # fmt: skip
    images = torch.randn(320, 64)
    examples = TensorDataset(images, images.argmax(1) % 10)
    trainer.fit(Net(), *(DataLoader(examples, 16) for _ in range(2)))


def ended(pid: int) -> bool:
    """True if a process is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


LAUNCHERS = {
    "Lightning": [],
    "torchrun": ["-m", *local(2), "-m"],
    "two nodes": ["-m", *emulated(2), "-m"],
}


def ranks_case(launcher: str, how: str, failing: int, phase: str, limit: float) -> tuple[str, str]:
    """The seconds until the other rank ended, and its message."""
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/output", "w+") as file:
        script = LAUNCHERS[launcher] or ["-m"]
        command = [sys.executable, *script, "benchmarks.faults", "ranks", "--rank", how, str(failing), phase, folder]
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
        begin, seconds, pids = time.monotonic(), f"more than {limit:g}", {}
        while time.monotonic() - begin < limit:
            time.sleep(0.1)
            texts = {int(path.name[4:]): path.read_text() for path in Path(folder).glob("rank?")}
            pids = {number: int(text) for number, text in texts.items() if text}
            moment = Path(folder, "fault")
            if moment.exists() and ended(pids[1 - failing]):
                seconds = f"{time.time() - float(moment.read_text()):.1f}"
                break
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)  # benchmarks.link removes its nodes
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output = Path(file.name).read_text()
    said = re.findall(rf"rank {1 - failing} of 2, step \d+, [^\n]*", output) or re.findall(r"\w+Error: [^\n]*", output)
    explained = [line for line in said if "the exchange failed" in line] or said
    return seconds, explained[-1].split(" [")[0] if explained else "nothing"


def ranks(options: argparse.Namespace) -> None:
    """Print the table, line by line."""
    head = ["launcher", "fault", "on rank", "at", "seconds until the other has ended", "the other's message"]
    print(report.table(head, []))
    for case in itertools.product(options.launchers, options.faults, (0, 1), options.phases):
        if (case[0] == "two nodes") == (case[1] == "cut off"):
            print(f"| {' | '.join(map(str, [*case, *ranks_case(*case, options.limit)]))} |", flush=True)


# Workers of a server


SECRET = "word"
SILENCE, STALENESS = timedelta(seconds=2), 4
PROCESSES = multiprocessing.get_context("forkserver")
"""Forked, because importing torch in each process would take longer than the runs."""


def network() -> nn.Module:
    """64 pixels -> 10 classes, 21,000 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of servers and workers."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


PUSHES = lgc.DGC(sparsity=0.9, min_elements=256)


def serve(address: Any) -> None:
    """Run a server in this process and send its address."""
    model = network()
    server = lgc.ParameterServer(model, sgd(model), PUSHES, secret=SECRET, staleness=STALENESS, timeout=SILENCE)
    server.start()
    address.send(server.address)
    time.sleep(3600)


@dataclass(frozen=True)
class Orders:
    """A worker's instructions.

    Args:
        address: address of the server.
        out: file that receives a line of JSON per step.
        seed: seed for drawing images.
        compute: pause in a step, in seconds.
        times: shared by all: when to end and when to fail.
        fault, phase: how and where to fail; "" for not at all.
    """

    address: str
    out: Path
    seed: int
    compute: float
    times: Any
    fault: str = ""
    phase: str = ""


def fail_amid_message(orders: Orders) -> None:
    """From now on, this process fails after it has sent half of a push or read half of a pull."""
    send, receive = socket.socket.sendall, socket.socket.recv_into

    def sendall(self, data, *flags):
        if len(data) < 1000:  # a header
            return send(self, data, *flags)
        send(self, memoryview(data)[: len(data) // 2], *flags)
        return fail_and_say(orders)

    def recv_into(self, buffer, *sizes, **flags):
        if len(buffer) < 1000:
            return receive(self, buffer, *sizes, **flags)
        receive(self, memoryview(buffer)[: len(buffer) // 2], *sizes, **flags)
        return fail_and_say(orders)

    if orders.phase == "push":
        socket.socket.sendall = sendall  # type: ignore[method-assign]
    else:
        socket.socket.recv_into = recv_into  # type: ignore[method-assign]


def fail_and_say(orders: Orders) -> None:
    say(orders, fault=time.time())
    fail(orders.fault)


def say(orders: Orders, **words: Any) -> None:
    """Append a line to the worker's file."""
    with orders.out.open("a") as file:
        print(json.dumps(words), file=file)


def work(orders: Orders) -> None:
    """Train until the time is up."""
    sys.stderr = orders.out.with_suffix(".log").open("w")
    torch.set_num_threads(1)
    (images, labels), model = digits()[0].tensors, network()
    how: dict[str, Any] = {"servers": [orders.address], "secret": SECRET, "world": 4}
    averager = lgc.AsyncAverager(model, sgd(model), PUSHES, timeout=timedelta(seconds=20), **how)
    generator = torch.Generator().manual_seed(orders.seed)
    armed = False
    while time.time() <= orders.times[0]:
        if orders.fault and not armed and time.time() >= orders.times[1]:
            armed = True
            if orders.phase == "step":
                fail_and_say(orders)
            fail_amid_message(orders)
        time.sleep(orders.compute)
        chosen = torch.randint(len(images), (16,), generator=generator)
        model.zero_grad()
        nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        try:
            averager.step()
        except RuntimeError as error:
            say(orders, error=type(error).__name__, at=time.time())
            return
        say(orders, step=time.time())
    averager.pull()
    say(orders, accuracy=accuracy(model))
    averager.close()


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Accuracy on the validation images, in %."""
    images, labels = digits()[1].tensors
    return 100 * float((model(images).argmax(1) == labels).float().mean())


class Crowd:
    """Workers and a server, each in its own process.

    Args:
        folder: folder for the workers' files.
        compute: pause in a step, in seconds.
    """

    def __init__(self, folder: Path, compute: float) -> None:
        self.folder, self.compute = folder, compute
        self.times = PROCESSES.Array("d", [math.inf, math.inf])
        here, there = multiprocessing.Pipe()
        self.processes: dict[str, Any] = {"server": PROCESSES.Process(target=serve, args=(there,))}
        self.processes["server"].start()
        self.address = here.recv()

    def start(self, name: str, **more: str) -> None:
        """Start a worker."""
        place, seed = self.folder / name, len(self.processes)
        orders = Orders(self.address, place, seed, self.compute, self.times, **more)
        self.processes[name] = PROCESSES.Process(target=work, args=(orders,))
        self.processes[name].start()

    def said(self, name: str, key: str) -> list[Any]:
        """Everything that a worker has written under a key."""
        file = self.folder / name
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [line[key] for line in lines if key in line]

    def wait_for(self, names: Sequence[str], key: str) -> float:
        """Wait, up to two minutes, until all of them have written something under a key. Returns the time."""
        limit = time.monotonic() + 120
        while not all(self.said(name, key) for name in names):
            if time.monotonic() > limit:
                raise TimeoutError(f"{key} of {names}: see {self.folder}")
            time.sleep(0.02)
        return time.time()

    def end(self) -> None:
        """Kill all processes."""
        for process in self.processes.values():
            process.kill()
            process.join()


def crowd_case(phase: str, fault: str, options: argparse.Namespace) -> dict[str, Any]:
    """One line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        crowd = Crowd(Path(folder), options.compute_ms / 1e3)
        stay = [f"stays {number}" for number in range(3)]
        try:
            for name in stay:
                crowd.start(name)
            crowd.start("lost", fault=fault, phase=phase)
            begin = crowd.wait_for([*stay, "lost"], "step")
            time.sleep(options.seconds)
            crowd.times[1] = 0.0
            crowd.wait_for(["lost"], "fault")
            [failed] = crowd.said("lost", "fault")
            time.sleep(options.seconds)
            crowd.start("comes")
            then = time.time()
            joined = crowd.wait_for(["comes"], "step")
            time.sleep(options.seconds)
            end = crowd.times[0] = time.time()
            crowd.wait_for([*stay, "comes"], "accuracy")
            steps = [crowd.said(name, "step") for name in stay]
            return {
                "at": phase,
                "fault": fault,
                "steps/s before": rate(steps, begin, failed),
                "after": rate(steps, failed, then),
                "with a fifth": rate(steps, joined, end),
                "longest pause, s": max(pause(each, failed, then) for each in steps),
                "longest before": max(pause(each, begin, failed) for each in steps),
                "accuracy at the end, %": mean(crowd.said(name, "accuracy")[0] for name in stay),
            }
        finally:
            crowd.end()


def rate(steps: list[list[float]], begin: float, end: float) -> float:
    """Mean steps per second of a worker."""
    return mean(sum(begin <= at < end for at in each) / (end - begin) for each in steps)


def pause(steps: list[float], begin: float, end: float) -> float:
    """The longest pause between two steps of which the later is in this interval; the whole interval if none is."""
    return max((b - a for a, b in itertools.pairwise(steps) if begin <= b < end), default=end - begin)


def server_killed(options: argparse.Namespace) -> str:
    """Kill the server. Returns a sentence on how long its workers take to notice."""
    with tempfile.TemporaryDirectory() as folder:
        crowd, names = Crowd(Path(folder), options.compute_ms / 1e3), [f"worker {n}" for n in range(4)]
        try:
            for name in names:
                crowd.start(name)
            crowd.wait_for(names, "step")
            crowd.processes["server"].kill()
            killed = time.time()
            crowd.wait_for(names, "error")
            errors = {error for name in names for error in crowd.said(name, "error")}
            last = max(crowd.said(name, "at")[0] for name in names) - killed
            return f"server killed: its 4 workers end with {', '.join(errors)}, the last after {last:.2f} s"
        finally:
            crowd.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=PHASES)
    parser.add_argument("--faults", nargs="+", help="killed, stopped, raises, cut off")
    parser.add_argument("--phases", nargs="+", help="such as step, push, round, checkpoint")
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=LAUNCHERS, help="for ranks")
    parser.add_argument("--limit", type=float, default=90.0, help="limit for a case of ranks, in seconds")
    parser.add_argument("--compute-ms", type=float, default=100.0, help="pause in a step of async")
    parser.add_argument("--seconds", type=float, default=15.0, help="before a fault, after it, and with a fifth")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.faults = options.faults or FAULTS[options.system]
    options.phases = options.phases or PHASES[options.system]
    if options.rank:
        rank(*options.rank)
    elif options.system == "ranks":
        ranks(options)
    else:
        lines = []
        for phase, fault in itertools.product(options.phases, options.faults):
            lines.append(crowd_case(phase, fault, options))
            print(json.dumps(lines[-1]), file=sys.stderr, flush=True)
        rows = [[f"{value:.2f}" if isinstance(value, float) else value for value in each.values()] for each in lines]
        print(report.table(list(lines[0]), rows))
        print(server_killed(options))
        print(f"{report.machine()}, load {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    main()
