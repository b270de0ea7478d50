"""`gradcomp server [HOST:PORT] ...` and `gradcomp join HOST:PORT ...`: their words, their secret, what they refuse.

Both compose a run from overrides as `gradcomp` does, each its own: from the network come numbers and tensors alone.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from lightning_gradcomp.app import processes
from lightning_gradcomp.app.config import DistAsync, Run, name_of
from lightning_gradcomp.app.options.limits import one_of
from lightning_gradcomp.errors import refusal

SECRET = "GRADCOMP_SECRET"
"""Environment variable: what a worker has to know to join."""
ADDRESS = re.compile(r"(\[[\w.:%]+\]|[\w.-]+):\d{1,5}")
MOST_PORT = 65535


def split(words: list[str]) -> tuple[str, str, list[str]]:
    """(process, address, overrides) of a command line: the process is "train", "server" or "join".

    Raises:
        ValueError: no address to join, a port that is none, or no secret; ranks that a launcher has started.
    """
    if words[:1] not in (["server"], ["join"]):
        return "train", "", words
    process, *rest = words
    address = rest.pop(0) if rest and ADDRESS.fullmatch(rest[0]) else ""
    if address and int(address.rpartition(":")[2]) > MOST_PORT:
        raise refusal(f"gradcomp {process}", address, f"HOST:PORT, with a port up to {MOST_PORT}")
    if process == "join" and not address:
        raise refusal("gradcomp join", " ".join(rest[:1]) or None, "HOST:PORT first, as `gradcomp server` prints it")
    if process == "join" and not os.environ.get(SECRET):
        raise ValueError(f"gradcomp join needs the server's secret in the environment variable {SECRET}")
    if processes.started_by_launcher():
        raise refusal(f"gradcomp {process}", "ranks of torchrun or SLURM", "one start for each server and worker")
    if not any(word.startswith("strategy=") for word in rest):
        rest.append("strategy=dist_async")
    return process, address or "127.0.0.1:0", rest


def secret_of(folder: Path) -> str:
    """The environment's, or a new one, which the file `secret` in `folder` then has for its owner alone."""
    if found := os.environ.get(SECRET):
        return found
    made = secrets.token_hex()
    with os.fdopen(os.open(folder / "secret", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
        file.write(made)
    return made


def check(run: Run) -> None:
    """ValueError for options that have no effect on a server and its workers."""
    if not isinstance(run.strategy, DistAsync):
        raise refusal("strategy of a server", name_of("strategy", run.strategy), "dist_async")
    plain = {
        "evaluate": (run.evaluate, False),
        "dry_run": (run.dry_run, False),
        "strategy.checkpoint_state": (run.strategy.checkpoint_state, "auto"),
        "trainer.precision": (run.trainer.precision, "32-true"),
        "trainer.accumulate_grad_batches": (run.trainer.accumulate_grad_batches, 1),
        "trainer.ema_decay": (run.trainer.ema_decay, None),
        "trainer.checkpoint_every_n_steps": (run.trainer.checkpoint_every_n_steps, None),
        "trainer.patience": (run.trainer.patience, None),
        "trainer.profiler": (run.trainer.profiler, None),
        "data.dirichlet": (getattr(run.data, "dirichlet", None), None),
    }
    one_of("logger with gradcomp server and join", name_of("logger", run.logger), ("csv", "none"))
    for option, (got, allowed) in plain.items():
        if got != allowed:
            raise refusal(f"{option} with gradcomp server and join", got, f"{allowed}")
    if run.trainer.num_nodes not in ("auto", 1):
        allowed = "auto: trainer.devices is the number of workers that a run is planned for"
        raise refusal("trainer.num_nodes with gradcomp server and join", run.trainer.num_nodes, allowed)
