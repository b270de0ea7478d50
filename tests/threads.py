"""Ranks as threads: collectives of several ranks inside one process, in a tenth of a second instead of ten.

Only this file uses the underscore API that this requires.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from lightning_gradcomp.averaging import ranks

ALL_GATHER = ranks.ALL_GATHER
GATHERS = (ALL_GATHER, "all_to_all_single")
"""Each of these brings every rank's message to every rank."""

_joined: dict[tuple[int, float], dict[int, dist.ProcessGroup]] = {}
"""Groups by size and timeout, for reuse: joining eight ranks takes longer than most tests."""

_divided: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""The subgroups that a group's rank belongs to, by their members; kept as long as the group."""

_stores: WeakKeyDictionary[dist.ProcessGroup, dist.Store] = WeakKeyDictionary()
"""The store through which the ranks of a group joined."""

COLLECTIVES = ("all_reduce", ALL_GATHER, "all_gather", "reduce_scatter_tensor", "all_to_all_single", "isend")
"""With `isend`, of which every rank makes the same number, of the same lengths."""


def short_sum(world: int, num_bytes: int) -> list[tuple[str, int]]:
    """What ranks pass to collectives to sum a short fp32 vector, as logged by `checked_collectives`."""
    if world == 2:
        return [(ALL_GATHER, num_bytes)]
    return [("all_to_all_single", 4 * -(-num_bytes // (4 * world)))] * 2


def run_ranks(world: int, fn: Callable[[int, dist.ProcessGroup], Any], timeout: float = 60) -> list[Any]:
    """Returns `[fn(0, group_0), fn(1, group_1), …]`, each run in its own thread, with groups joined over gloo.

    Raises the first error of any rank, and TimeoutError if a rank still runs `timeout` seconds after the start.
    Seeding torch's global generator inside `fn` is a race between the ranks: use a separate generator.
    """
    store, done = dist.HashStore(), queue.SimpleQueue()
    groups = _joined.pop((world, timeout), {})

    def rank_main(rank: int) -> None:
        try:
            torch.set_num_threads(1)
            if rank not in groups:  # always kept: a rank that leaves early must not disconnect the others
                groups[rank] = _group(store, rank, world, timeout)
                _stores[groups[rank]] = store
            result = fn(rank, groups[rank])
            done.put((rank, result, None))
        except BaseException as error:  # every error belongs to the caller, even a failed assertion
            done.put((rank, None, error))

    for rank in range(world):
        threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True).start()
    deadline, results = time.monotonic() + timeout, {}
    while len(results) < world:
        try:
            rank, result, error = done.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            late = sorted(set(range(world)) - set(results))
            raise TimeoutError(f"rank {late} of {world} still running after {timeout} s") from None
        if error is not None:
            raise error
        results[rank] = result
    _joined[world, timeout] = groups  # not after an error, which may leave ranks at different collectives
    return [results[rank] for rank in range(world)]


@contextmanager
def checked_collectives(world: int, timeout: float = 10) -> Iterator[list[list[tuple[str, int]]]]:
    """Inside, log (collective, input bytes) for each rank, and raise AssertionError if ranks differ.

    An all-to-all is logged with the bytes sent to each rank if these are equal, otherwise as "scatter" with their sum.

    If a collective differs between ranks, gloo hangs or aborts the process.
    """
    log: list[list[tuple[str, int]]] = [[] for _ in range(world)]
    together = threading.Barrier(world)

    def checked(name: str, collective: Callable) -> Callable:
        def call(*tensors: torch.Tensor, group: dist.ProcessGroup, **options: Any) -> Any:
            put_in = tensors[1 if name == "all_to_all_single" else -1]
            size, lengths = put_in.numel() * put_in.element_size(), len(set(tensors[-1])) if len(tensors) == 4 else 1
            if name == "all_to_all_single":
                log[group.rank()].append((name, size // world) if lengths == 1 else ("scatter", size))
            else:
                log[group.rank()].append((name, size))
            together.wait(timeout)
            latest = [calls[-1] for calls in log]
            together.wait(timeout)
            assert len(set(latest)) == 1, f"ranks differ in what they exchange: {latest}"
            return collective(*tensors, group=group, **options)

        return call

    with ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(mock.patch.object(dist, name, checked(name, getattr(dist, name))))
        yield log


@cache
def _loopback() -> Any:
    """The device of all groups: a separate one for each would start a thread, which takes longer than most tests."""
    return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")


@contextmanager
def subgroups(timeout: float = 60) -> Iterator[None]:
    """Inside, ranks that are threads can be divided into nodes; dist.new_group supports only processes."""

    def subgroup(group: dist.ProcessGroup, members: list[int]) -> dist.ProcessGroup:
        known = _divided.setdefault(group, {})
        if tuple(members) not in known:
            own = dist.PrefixStore(f"{members}", _stores[group])
            known[tuple(members)] = _group(own, members.index(group.rank()), len(members), timeout)
        return known[tuple(members)]

    with mock.patch.object(ranks, "subgroup", subgroup):
        yield


def _group(store: dist.Store, rank: int, world: int, timeout: float) -> dist.ProcessGroup:
    """This rank's process group over gloo, on the loopback interface."""
    group = dist.ProcessGroup(store, rank, world)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout)
    options._devices = [_loopback()]
    backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, world, options)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group
