"""How many ranks a run has, who starts them, and on which devices they compute."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lightning_gradcomp.errors import Refused, refusal

FEWEST = 2
"""Default number of ranks on one machine: a single rank compresses nothing."""

STOPPED = 143
"""The shell's exit code for a SIGTERM; a rank that saved a checkpoint after one exits with it."""

REFUSALS = (Refused, MisconfigurationException)
"""What a rank raises for an option that turns out to be invalid once the ranks are connected."""


class Placement(NamedTuple):
    """Where a run takes place."""

    accelerator: str  # "cuda" or "cpu"
    per_node: int
    nodes: int

    @property
    def world(self) -> int:
        """Total number of ranks."""
        return self.per_node * self.nodes

    @property
    def shared_gpus(self) -> list[torch.device]:
        """The GPU of each rank, assigned in turn, if a node has fewer GPUs than ranks; otherwise empty.

        Such ranks exchange over gloo: NCCL allows one rank per GPU.
        """
        gpus = torch.cuda.device_count()
        if self.accelerator == "cpu" or self.per_node <= gpus:
            return []
        return [torch.device("cuda", rank % gpus) for rank in range(self.per_node)]


def place(accelerator: str, devices: int | str, num_nodes: int | str) -> Placement:
    """Resolve the Trainer options of these names on this machine: "auto" is one rank per GPU, but at least two."""
    if accelerator not in ("auto", "cpu", "cuda"):
        raise refusal("trainer.accelerator", accelerator, "auto, cpu, cuda")
    for option, given in (("devices", devices), ("num_nodes", num_nodes)):
        if given != "auto" and (type(given) is not int or not 1 <= given <= 65536):
            raise refusal(f"trainer.{option}", given, "auto, or a whole number from 1")
    gpus = 0 if accelerator == "cpu" else torch.cuda.device_count()
    if accelerator == "cuda" and not gpus:
        raise refusal("trainer.accelerator", accelerator, "auto, cpu: there is no GPU here")
    there = launched()
    per_node, nodes = there or (max(gpus, FEWEST), 1)
    if there is None and num_nodes not in ("auto", 1):
        raise refusal("trainer.num_nodes", num_nodes, "1; under torchrun or SLURM more")
    for option, given, started in (("devices", devices, per_node), ("num_nodes", num_nodes, nodes)):
        if there and given not in ("auto", started):
            raise refusal(f"trainer.{option}", given, f"auto, or the {started} that torchrun or SLURM has started")
    return Placement("cuda" if gpus else "cpu", per_node if devices == "auto" else int(devices), nodes)


def launched() -> tuple[int, int] | None:
    """(ranks on this node, nodes) started by torchrun or SLURM; None if this process must start the ranks."""
    if TorchElasticEnvironment.detect():
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return local, int(os.environ["WORLD_SIZE"]) // local
    if SLURMEnvironment.detect():
        nodes = int(os.environ.get("SLURM_NNODES", 1))
        return int(os.environ["SLURM_NTASKS"]) // nodes, nodes
    return None


def is_rank_zero() -> bool:
    """True in the process of rank 0 and in a process that starts the ranks."""
    return all(os.environ.get(rank, "0") == "0" for rank in ("RANK", "SLURM_PROCID"))


class RankFailed(Exception):
    """A rank failed. The message says which one, and why."""


def start(ranks: int, run: Callable[..., Any], *arguments: Any) -> Any:
    """Call `run(*arguments)` in each of `ranks` fresh processes on this machine. Returns what rank 0 returned.

    If one fails, the others are ended. A SIGTERM or Ctrl-C is passed on to all ranks, which end together; a second one
    kills them.

    Raises:
        RankFailed: if a rank failed. Its traceback was printed, unless it refused an option.
        SystemExit: if a signal asked this process or a rank to stop, and all ranks have ended.
    """
    received: list[tuple[int, float]] = []  # signals, and when
    for name in ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn"):
        logging.getLogger(name).disabled = True  # RankFailed says the same, shorter
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = threads or str(max(1, len(os.sched_getaffinity(0)) // ranks))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id="gradcomp", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1, start_method="spawn",
    )  # fmt: skip
    receive = lambda number, _: received.append((number, time.monotonic()))  # noqa: E731
    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with ThreadPoolExecutor(1) as thread:  # in the main thread, torch's signal handlers would replace `receive`
            future = thread.submit(elastic_launch(config, run), *arguments)
            _pass_on(received, future)
        if received:
            sys.exit(128 + received[0][0])  # ends a sweep too
        result = future.result()[0]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == STOPPED:
            sys.exit(STOPPED)
        raise RankFailed(_reason(rank, failure)) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
    return result


def _pass_on(received: list[tuple[int, float]], future: Future[Any]) -> None:
    """Pass `received` signals on to the ranks until `future` is done, also to ranks that start after a signal."""
    told: set[multiprocessing.process.BaseProcess] = set()
    while not wait([future], timeout=0.1).done:
        children = multiprocessing.active_children() if received else []
        is_second = received[-1][1] - received[0][1] > 1 if received else False  # s; `timeout` may send the first twice
        for child in children:
            if is_second:
                child.kill()
            elif child not in told:
                child.terminate()
        told.update(children)


def _reason(rank: int, failure: Any) -> str:
    """Why a rank failed. Prints its traceback, if that is useful."""
    if not isinstance(failure.message, dict):  # a signal, or an exit code
        return f"rank {rank} ended with {failure.message if failure.exitcode < 0 else f'exit code {failure.exitcode}'}"
    kind, _, said = failure.message["message"].partition(": ")
    if kind in [cls.__name__ for cls in (*REFUSALS, *Refused.__subclasses__())]:
        return said
    print(failure.message["extraInfo"]["py_callstack"], file=sys.stderr)
    return f"rank {rank} failed: {kind}: {said}"
