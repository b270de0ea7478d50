"""The processes of a run: who starts the ranks, how many there are, and the process that trains.

A run trains in a process of its own, so that the jobs of a sweep can't inherit anything from each other: environment
variables, thread counts and process groups end with it. Lightning starts the other ranks by running that process's
command again; under Hydra that would be the whole sweep.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

import lightning_gradcomp
from lightning_gradcomp.app.options.training import Trainer
from lightning_gradcomp.errors import refusal

COMMAND = Path(lightning_gradcomp.__file__).resolve().parents[1] / "gradcomp_command.py"
"""Of the same checkout or installation as this package."""


def started_by_launcher() -> bool:
    """Whether this process is one of several ranks that torchrun, SLURM or the user has started."""
    return "RANK" in os.environ or "LOCAL_RANK" in os.environ or "NODE_RANK" in os.environ or in_slurm()


def in_slurm() -> bool:
    """Whether SLURM has started the ranks. Lightning's rule: in an interactive job it has not."""
    return "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")


def is_rank_zero() -> bool:
    """Whether this is rank 0, or the only one."""
    return all(os.environ.get(rank, "0") == "0" for rank in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"))


def launched() -> tuple[int, int] | None:
    """(processes on this node, nodes) that torchrun or SLURM has started; None where Lightning starts the ranks."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return local, int(os.environ["WORLD_SIZE"]) // local
    if in_slurm():
        nodes = int(os.environ.get("SLURM_NNODES", 1))
        return int(os.environ["SLURM_NTASKS"]) // nodes, nodes
    return None


def devices(options: Trainer) -> tuple[str, int, int]:
    """(accelerator, ranks a node, nodes), with "auto" replaced by what it means here: "cuda" or "cpu", and numbers.

    Without a launcher there is one rank for each GPU, and two at least on a single node, since one compresses nothing:
    two that share its only GPU, or two on the CPU.

    Raises:
        ValueError: a GPU is asked for, and there is none; other numbers than those of a launcher.
    """
    accelerator = options.accelerator
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise refusal("trainer.accelerator", accelerator, "auto, cpu: there is no GPU here")
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    gpus = torch.cuda.device_count() if accelerator == "cuda" else 0
    alone = options.num_nodes in ("auto", 1)
    started = launched()
    per_node, nodes = started or (max(gpus, 2) if alone or not gpus else gpus, 1)
    for option, given, there in (("devices", options.devices, per_node), ("num_nodes", options.num_nodes, nodes)):
        if started and given not in ("auto", there):
            raise refusal(f"trainer.{option}", given, f"auto, or the {there} that torchrun or SLURM has started")
    if options.devices != "auto":
        per_node = options.devices
    if options.num_nodes != "auto":
        nodes = options.num_nodes
    return accelerator, per_node, nodes


def shared_gpus(accelerator: str, per_node: int) -> list[torch.device]:
    """The GPU of each rank of a node that has fewer GPUs than ranks, in turn; otherwise empty.

    Such ranks must exchange over gloo: NCCL allows one rank a GPU.
    """
    gpus = torch.cuda.device_count()
    if accelerator == "cpu" or per_node <= gpus:
        return []
    return [torch.device("cuda", rank % gpus) for rank in range(per_node)]


def check_rendezvous(nodes: int) -> None:
    """ValueError where ranks of several nodes would wait for each other in vain: without a launcher, they meet only at
    an address that all have been given."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if nodes > 1 and launched() is None and missing:
        allowed = f"1; under torchrun or SLURM, or with {' and '.join(missing)} set, more"
        raise refusal("trainer.num_nodes", nodes, allowed)


def run(process: str, *words: str, environment: Mapping[str, str] | None = None) -> int:
    """Run `gradcomp_command.py --process PROCESS WORDS`, and wait for its end: 0, or the code that it failed with.

    Args:
        environment: variables besides those of this process.

    Raises:
        SystemExit: a signal asked this process to stop; the child has ended before.
    """
    command = [sys.executable, str(COMMAND), "--process", process, *words]
    child = subprocess.Popen(command, env={**os.environ, **(environment or {})})
    received: list[int] = []

    def stop(number: int, _: object) -> None:
        received.append(number)
        if number == signal.SIGTERM:  # from `timeout` or a batch system; the terminal sends a Ctrl-C to both processes
            child.terminate()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    code = child.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    if received:  # ends a sweep too, with the shell's code for the signal
        sys.exit(128 + received[0])
    return code


LOGGED = (
    "Initializing distributed: ",  # the strategy's own line says how many ranks there are
    f"{'-' * 100}\ndistributed_backend=",
    "Restored all states from ",  # after "Restoring states from"
    "`Trainer(limit_val_batches=",  # was asked for too
    "`Trainer.fit` stopped: ",  # by max_epochs, which was asked for
    "GPU available: ",  # the summary names the device
    "TPU available: ",
    "HPU available: ",
    "💡 Tip: For seamless cloud ",  # advertises litlogger and litmodels
)
WARNED = (
    r".*LeafSpec\(?\)?.* is deprecated",  # inside Lightning 2.6 with torch 2.15, once an epoch
    r".*`torch\.distributed\.\w+` is deprecated",  # torch 2.14 has new names, which the oldest supported torch lacks
    r"The '\w+' does not have many workers",  # the images are in memory already
    r"Experiment logs directory .* exists and is not empty",  # holds our config.yaml; at most a metrics.csv is replaced
    r"You're resuming from a checkpoint that ended before the epoch ended",  # SharedImages skips what was seen
    r"The dirpath has changed from",  # a resumed run writes into a folder of its own
    r"Be aware that when using `ckpt_path`, callbacks",  # evaluate=true needs none of them
    r"GPU available but not used",  # trainer.accelerator=cpu was asked for
)


DISTRIBUTED = "lightning.fabric.utilities.distributed"


def hide_known_messages() -> None:
    """Drop messages of Lightning and torch that are of no use to users of `gradcomp`; others are shown."""
    for message in WARNED:
        warnings.filterwarnings("ignore", message=message)
    for name in (*(f"lightning.{part}.utilities.rank_zero" for part in ("pytorch", "fabric")), DISTRIBUTED):
        logging.getLogger(name).addFilter(lambda record: not record.getMessage().startswith(LOGGED))
