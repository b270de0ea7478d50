"""Errors for lost ranks: which rank noticed, at which step, in which phase, and which ranks are missing.

torch.distributed reports a lost peer as a RuntimeError with its address, or as a timeout without one. Every rank that
fails writes its reason into the rendezvous store, so that the others can name the ranks that wrote none.

If the store's server is stopped or unreachable, a TCPStore call blocks forever, even with a timeout. Every call here
therefore runs in a daemon thread on its own connection (a blocked call locks its connection), and the caller waits at
most `STORE_SECONDS`.

gloo's destructors wait for a lost peer as long as its collectives do. If a group whose exchange has failed still exists
at exit, SIGALRM therefore kills a process that takes longer than `EXIT_SECONDS` to exit after all other exit handlers.
A program that has destroyed the group and continued exits as usual.
"""

from __future__ import annotations

import atexit
import logging
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from weakref import WeakSet

import torch.distributed as dist

from lightning_gradcomp.errors import help_at

log = logging.getLogger(__name__)
BACKENDS = re.compile(r"gloo|nccl", re.IGNORECASE)
"""Matches the backends' messages about lost peers; gloo's are plain RuntimeErrors."""
LOST = re.compile(r"\bconnection|\bsocket|broken pipe|\btimed? ?out", re.IGNORECASE)
"""Matches other messages about lost peers, such as the store's."""
EXCHANGES = ("torch.distributed", "torch.autograd", "torch.nn.parallel", "lightning_gradcomp")
"""Modules whose frames call collectives or the store."""
TIMEOUT = timedelta(minutes=5)
"""Default time to wait for other ranks. torch's 30 minutes is long if a rank has died or hangs."""
STORE_SECONDS = 2.0
"""Seconds to wait for the other ranks' reasons. Lightning kills a run's processes 5 s after one has died."""
EXIT_SECONDS = 1.0
"""Seconds that the interpreter may take to exit after the exit handlers if a failed group still exists."""
LATE_SECONDS = 6.0
"""Seconds that any other exit waits for store calls. To connect, torch resolves the store's host name, which takes 5 s
if the name server does not answer."""


class ExchangeFailed(RuntimeError):
    """The other ranks can't be reached."""


class _Exit:
    """An exit handler that limits the duration of the exit if one of the `failed` groups still exists.

    Otherwise it waits for `late` threads: a return from torch while the interpreter exits would abort the process.
    """

    def __init__(self) -> None:
        self.failed: WeakSet[dist.ProcessGroup] = WeakSet()
        self.late: list[threading.Thread] = []

    def __call__(self) -> None:
        if self.failed:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, EXIT_SECONDS)
            return
        deadline = time.monotonic() + LATE_SECONDS
        for thread in self.late:
            thread.join(max(0.0, deadline - time.monotonic()))


_exit = _Exit()
atexit.register(_exit)  # handlers run in reverse order: the loggers', registered later, run first


def is_lost_peer(error: BaseException) -> bool:
    """True if `error` is torch.distributed's error for an unreachable rank."""
    if not isinstance(error, RuntimeError) or not dist.is_initialized():
        return False
    if BACKENDS.search(str(error)):
        return True
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    of_an_exchange = not frames or frames[-1].startswith(EXCHANGES)  # "the connection to the feature store is closed"
    return of_an_exchange and bool(LOST.search(str(error)))


@contextmanager
def explained(step: int, doing: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Inside, a failed collective raises an `ExchangeFailed` that names rank, step, phase and the missing ranks.

    `doing` is the phase, in words. Without `group`, all ranks take part.
    """
    try:
        yield
    except ExchangeFailed:
        raise
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise ExchangeFailed(explanation(error, step, doing, group)) from error


def explanation(error: BaseException, step: int, doing: str, group: dist.ProcessGroup | None = None) -> str:
    """The message for a failed collective. Logs the failure, and tells the other ranks within `STORE_SECONDS`."""
    _exit.failed.update(each for each in (dist.group.WORLD, group) if each is not None)
    rank = dist.get_rank()
    where, cause = f"rank {rank} of {dist.get_world_size()}, step {step}, {doing}", str(error).splitlines()[0]
    # Logged at once: if a process has died, the launcher may kill this one before it raises.
    log.error(f"{where}: lost the other ranks")
    others = [other for other in dist.get_process_group_ranks(group or dist.group.WORLD) if other != rank]
    reasons: dict[int, str] = {}

    def ask(store: dist.Store) -> None:
        store.set(_key(rank), f"lost the others at step {step} ({doing})")
        deadline = time.monotonic() + STORE_SECONDS
        for other in others:
            left = max(0.01, deadline - time.monotonic() - 0.2)
            with suppress(RuntimeError):  # no reason posted: it still runs, hangs, or was killed
                store.wait([_key(other)], timedelta(seconds=left))
                reasons[other] = store.get(_key(other)).decode()

    _with_store(ask)
    missing = (f"rank {other} {reasons.get(other, 'does not respond')}" for other in others)
    return f"{where}: the exchange failed; {', '.join(missing)} [{cause}] {help_at('exchange-failed')}"


def post_reason(what: str) -> None:
    """Tell the other ranks why this one ends, if the store answers within `STORE_SECONDS`."""
    if dist.is_initialized():
        key = _key(dist.get_rank())
        _with_store(lambda store: store.set(key, what))


def others_end() -> bool:
    """True if every other rank posts why it ends within `STORE_SECONDS`."""
    if not dist.is_initialized():
        return True
    others, posted = [_key(rank) for rank in range(dist.get_world_size()) if rank != dist.get_rank()], []

    def ask(store: dist.Store) -> None:
        for other in others:
            store.wait([other], timedelta(seconds=STORE_SECONDS - 0.2))
            posted.append(other)

    _with_store(ask)
    return posted == others


def _with_store(use: Callable[[dist.Store], None]) -> None:
    """Call `use` with a connection to the store if there are other ranks, and wait at most `STORE_SECONDS`."""
    if dist.get_world_size() == 1:
        return
    store = dist.distributed_c10d._get_default_store()  # torch has no public name for it

    def run() -> None:
        with suppress(RuntimeError, ValueError):  # the store ended with rank 0
            use(store.clone())

    thread = threading.Thread(target=run, name="store", daemon=True)
    thread.start()
    thread.join(STORE_SECONDS)
    if thread.is_alive():
        _exit.late.append(thread)


def _key(rank: int) -> str:
    return f"lightning_gradcomp/{rank}"
