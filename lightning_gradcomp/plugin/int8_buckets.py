"""DDP's buckets averaged in 8 bits by a thread, while backward computes the next ones."""

from __future__ import annotations

import queue
import threading
from collections.abc import Set
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_gradcomp.averaging.int8 import mean_in_int8
from lightning_gradcomp.averaging.ranks import subgroup


class Task(NamedTuple):
    """A bucket to average: its buffer, the gradients in it, step and bucket index, and the future to complete."""

    buffer: torch.Tensor
    large: list[torch.Tensor]
    small: list[torch.Tensor]
    key: tuple[int, int]
    ready: Any
    """The CUDA event after which the gradients are in the buffer; None on a CPU."""
    future: torch.futures.Future[Any]


class Int8Buckets:
    """A thread that averages one bucket after another, in the order in which DDP fills them.

    The thread has a process group of its own, because other threads' collectives may come in any order in between. On a
    GPU it also has its own stream. To make one is collective.

    Args:
        large: ids of the parameters whose gradients travel in 8 bits. The others' travel in fp32.
        device: the device of the gradients.
    """

    def __init__(self, large: Set[int], device: torch.device) -> None:
        world = dist.group.WORLD
        assert world is not None
        self._large, self._device = large, device
        self._group = subgroup(world, list(range(world.size())))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._num_threads = torch.get_num_threads()
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        # A daemon thread, so that a rank that raises can exit without waiting for the other ranks.
        self._thread = threading.Thread(target=self._run, name="int8 buckets", daemon=True)
        self._thread.start()

    def average(self, bucket: dist.GradBucket, step: int) -> torch.futures.Future[torch.Tensor]:
        """Start to average a bucket. The future's value is the bucket's buffer, which holds the means by then.

        If an exchange fails, this future and all later ones raise its error.
        """
        large, small = [], []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            (large if id(parameter) in self._large else small).append(gradient)
        ready = torch.cuda.current_stream(self._device).record_event() if self._stream else None
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[self._device] if self._stream else None)
        self._tasks.put(Task(bucket.buffer(), large, small, (step, bucket.index()), ready, future))
        return future.then(lambda done: done.value())  # DDP sees an exception that a callback raises, and no other

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        with torch.cuda.stream(self._stream):  # None has no effect
            while (task := self._tasks.get()) is not None:
                self._complete(task)
                del task  # holds the bucket

    def _complete(self, task: Task) -> None:
        try:
            if self._error:
                raise self._error
            if self._stream:
                self._stream.wait_event(task.ready)
            none = task.buffer[:0]
            means = mean_in_int8(self._group, [*task.large, none], [*task.small, none], *task.key)
            for gradients, mean in zip((task.large, task.small), means, strict=True):
                parts = mean.split([gradient.numel() for gradient in gradients]) if gradients else []
                for gradient, part in zip(gradients, parts, strict=True):
                    gradient.copy_(part.view(gradient.shape))
        except Exception as error:
            self._error = error
            task.future.set_exception(error)
        else:
            task.future.set_result(task.buffer)

    def close(self) -> None:
        """End the thread and its process group. A thread that waits for a lost rank is left behind."""
        self._tasks.put(None)
        self._thread.join(timeout=1.0)
        if not (self._thread.is_alive() or self._error):
            dist.destroy_process_group(self._group)
