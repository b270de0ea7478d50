"""Something on its way while training goes on: a thread does the exchange, and nobody waits for it until it is due."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Flight(Generic[T]):
    """A call that was started.

    It may use collectives of a process group that nothing else uses meanwhile. On a GPU it runs beside the training, in
    a stream of its own, and sees all that was queued before.

    Args:
        exchange: what to do.
        due: the step at which its result is wanted.
        device: where its tensors are.
    """

    def __init__(self, exchange: Callable[[], T], due: int, device: torch.device) -> None:
        self.due = due
        self.seconds = 0.0
        """How long it took, once it has landed."""
        self._exchange = exchange
        self._error: BaseException | None = None
        self._result: T
        self._threads = torch.get_num_threads()
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._beside:
            self._beside.wait_stream(torch.cuda.current_stream(device))
        # A daemon: a rank that fails for a reason of its own must not wait for the others before it may end.
        self._thread = threading.Thread(target=self._fly, name="exchange", daemon=True)
        self._begin = time.perf_counter()
        self._thread.start()

    def _fly(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with torch.cuda.stream(self._beside) if self._beside else nullcontext():
                self._result = self._exchange()
            if self._beside:
                self._beside.synchronize()  # so that `arrived` is true
        except BaseException as error:  # belongs to whoever waits
            self._error = error
        self.seconds = time.perf_counter() - self._begin

    @property
    def arrived(self) -> bool:
        """Whether `land` would return, or raise, at once."""
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether `land` would raise."""
        return self.arrived and self._error is not None

    def land(self) -> T:
        """Wait for the result.

        Raises:
            Exception: what the exchange has raised.
        """
        self._thread.join()
        if self._error:
            raise self._error
        return self._result
