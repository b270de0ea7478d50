"""An exchange in a background thread while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from time import perf_counter
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class BackgroundExchange(Generic[T]):
    """Runs a call in its own thread, which starts at once. The result is applied after step `due`.

    The call may use collectives of a process group that nothing else uses until it is done. On a GPU it runs on its own
    CUDA stream, after all work queued so far.
    """

    def __init__(self, exchange: Callable[[], T], due: int, device: torch.device) -> None:
        self.due = due
        self.seconds = 0.0
        """Duration of the call, once it is done."""
        self._exchange = exchange
        self._error: BaseException | None = None
        self._result: T
        self._num_threads = torch.get_num_threads()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        # A daemon thread, so that a rank that raises can exit without waiting for the other ranks.
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._begin = perf_counter()
        self._thread.start()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            with torch.cuda.stream(self._stream) if self._stream else nullcontext():
                self._result = self._exchange()
            if self._stream:
                self._stream.synchronize()  # so that `done` holds for the work on the GPU too
        except BaseException as error:  # raised by `wait`, in the caller's thread
            self._error = error
        self.seconds = perf_counter() - self._begin

    @property
    def done(self) -> bool:
        """True if `wait` would return or raise at once."""
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """True if the call has raised an error."""
        return self.done and self._error is not None

    def wait(self) -> T:
        """Wait until the call is done, and return its result or raise its error."""
        self._thread.join()
        if self._error:
            raise self._error
        return self._result
