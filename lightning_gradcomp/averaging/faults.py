"""When the ranks lose each other: an error that says which rank noticed, at which step, doing what, and who is missing.

torch.distributed reports a lost peer as a RuntimeError with an address in it, or a timeout without. Every rank that
fails leaves word in the store that the ranks met in, so the others can tell who has not.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

log = logging.getLogger(__name__)
LOST = re.compile(r"gloo|nccl|connection|socket|broken pipe|timed? ?out|application timeout", re.IGNORECASE)
"""What the messages of torch.distributed about lost peers have in common; gloo's are plain RuntimeErrors."""
TIMEOUT = timedelta(minutes=5)
"""How long to wait for other ranks by default: torch's 30 minutes are long for ranks that have died, or hang."""
PATIENCE = 2.0
"""Seconds to wait for word from the others. Lightning kills a run's processes 5 s after one of them has died."""


class ExchangeFailed(RuntimeError):
    """The other ranks can't be reached."""


@contextmanager
def explained(step: int, doing: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Turn a failed collective inside into an `ExchangeFailed` that names rank, step, phase, and who is missing.

    Args:
        step: optimizer steps done so far.
        doing: the phase, in words.
        group: the ranks; default: all.
    """
    try:
        yield
    except ExchangeFailed:
        raise
    except RuntimeError as error:
        if not LOST.search(str(error)) or not dist.is_initialized():
            raise
        rank = dist.get_rank()
        where, cause = f"rank {rank} of {dist.get_world_size()}, step {step}, {doing}", str(error).splitlines()[0]
        # At once: where a process has died, its launcher may end this one before it comes to raise anything.
        log.error(f"{where}: lost the other ranks")
        leave_word(f"lost the others at step {step} ({doing})")
        raise ExchangeFailed(f"{where}: the exchange failed; {_missing(rank, group)} [{cause}]") from error


def leave_word(what: str) -> None:
    """Tell the other ranks why this one ends. Nothing happens where they can't be told."""
    try:
        _store().set(_key(dist.get_rank()), what)
    except (RuntimeError, ValueError):  # no process group any more, or its store has gone with rank 0
        return


def _missing(rank: int, group: dist.ProcessGroup | None) -> str:
    deadline = time.monotonic() + PATIENCE
    words = []
    for other in dist.get_process_group_ranks(group or dist.group.WORLD):
        if other == rank:
            continue
        left = max(0.01, deadline - time.monotonic())
        try:
            _store().wait([_key(other)], timedelta(seconds=left))
            words.append(f"rank {other} {_store().get(_key(other)).decode()}")
        except (RuntimeError, ValueError):
            words.append(f"rank {other} gives no sign of life")
    return ", ".join(words)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()  # torch has no public name for it


def _key(rank: int) -> str:
    return f"lightning_gradcomp/{rank}"
