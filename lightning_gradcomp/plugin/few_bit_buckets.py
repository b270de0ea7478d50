"""DDP's buckets averaged in few bits by a thread, while backward computes the next ones."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_gradcomp.averaging.few_bits import mean_in_few_bits
from lightning_gradcomp.averaging.ranks import Nodes, Ranks, subgroup
from lightning_gradcomp.compressors.blocks import FewBits


class Bucket(NamedTuple):
    """A bucket to average: its buffer, the gradients in it, the step, and the future to complete."""

    buffer: torch.Tensor
    large: list[tuple[int, torch.Tensor]]
    """Those that travel in few bits, each with the number of its first block."""
    small: list[torch.Tensor]
    step: int
    ready: Any
    """The CUDA event after which the gradients are in the buffer; None on a CPU."""
    future: torch.futures.Future[Any]


class FewBitBuckets:
    """A thread that averages one bucket after another, in the order in which DDP fills them.

    The thread has process groups of its own, because other threads' collectives may come in any order in between. On a
    GPU it also has its own stream. To make one is collective. `large` has, for each parameter whose gradient travels in
    few bits, its id -> its first block. The others' travel in fp32. If there are several ranks `per_node`, they average
    inside their node first.
    """

    def __init__(self, form: FewBits, large: Mapping[int, int], device: torch.device, per_node: int = 1) -> None:
        world = dist.group.WORLD
        assert world is not None
        self._form, self._large, self._device = form, large, device
        everyone = [*range(world.size())]
        self._ranks = Nodes(world, per_node) if per_node > 1 else Ranks(subgroup(world, everyone))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._num_threads = torch.get_num_threads()
        self._tasks: queue.SimpleQueue[Bucket | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        # A daemon thread, so that a rank that raises can exit without waiting for the other ranks.
        self._thread = threading.Thread(target=self._run, name="few-bit buckets", daemon=True)
        self._thread.start()

    def average(self, bucket: dist.GradBucket, step: int) -> torch.futures.Future[torch.Tensor]:
        """Start to average a bucket. The future's value is the bucket's buffer, which holds the means by then.

        If an exchange fails, this future and all later ones raise its error.
        """
        large, small = [], []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if (first := self._large.get(id(parameter))) is None:
                small.append(gradient)
            else:
                large.append((first, gradient))
        ready = torch.cuda.current_stream(self._device).record_event() if self._stream else None
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[self._device] if self._stream else None)
        self._tasks.put(Bucket(bucket.buffer(), large, small, step, ready, future))
        return future.then(lambda done: done.value())  # DDP sees an exception that a callback raises, and no other

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        with torch.cuda.stream(self._stream):  # None has no effect
            while (task := self._tasks.get()) is not None:
                self._complete(task)
                del task  # holds the bucket

    @torch.no_grad()  # torch's setting is a thread's own
    def _complete(self, task: Bucket) -> None:
        try:
            if self._error:
                raise self._error
            if self._stream:
                self._stream.wait_event(task.ready)
            small = [*task.small, task.buffer[:0]]
            means, small_mean = mean_in_few_bits(self._ranks, self._form, task.large, small, task.step, 0)
            means += small_mean.split([gradient.numel() for gradient in task.small]) if task.small else ()
            gradients = [*(each for _, each in task.large), *task.small]
            torch._foreach_copy_(
                gradients, [mean.view(each.shape) for each, mean in zip(gradients, means, strict=True)]
            )
        except Exception as error:
            self._error = error
            task.future.set_exception(error)
        else:
            task.future.set_result(task.buffer)

    def close(self) -> None:
        """End the thread and its process groups. A thread that waits for a lost rank is left behind."""
        self._tasks.put(None)
        self._thread.join(timeout=1.0)
        if not (self._thread.is_alive() or self._error):
            for group in self._ranks.groups:
                dist.destroy_process_group(group)
