"""Who starts the ranks: Lightning, from one command, or somebody else (torchrun, SLURM), who starts a command each."""

from __future__ import annotations

import os


def started_elsewhere() -> bool:
    """Whether this process is one of several ranks that torchrun, SLURM or the user has started."""
    return "RANK" in os.environ or "LOCAL_RANK" in os.environ or "NODE_RANK" in os.environ or in_slurm()


def in_slurm() -> bool:
    """Whether SLURM has started the ranks. Lightning's rule: in an interactive job it has not."""
    return "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")


def is_first() -> bool:
    """Whether this is rank 0, or the only one."""
    return all(os.environ.get(rank, "0") == "0" for rank in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"))


def started() -> tuple[int, int] | None:
    """(processes on this node, nodes) that are running already; None where it is for Lightning to start them."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return local, int(os.environ["WORLD_SIZE"]) // local
    if in_slurm():
        nodes = int(os.environ.get("SLURM_NNODES", 1))
        return int(os.environ["SLURM_NTASKS"]) // nodes, nodes
    return None
