"""Exchanges on a simulated clock, so that tests of waits and schedules don't depend on wall time."""

import threading
from contextlib import contextmanager
from itertools import count
from unittest import mock

from lightning_gradcomp.local_sgd import averager as averager_module


class SimulatedClock(threading.local):
    """Seconds since the start of a rank, which is a thread. Only `advance` changes them."""

    def __init__(self):
        self.now = 0.0
        self.rounds = count()

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


@contextmanager
def simulated_exchanges(seconds, *, run_in_wait=False):
    """Inside, the nth exchange of each rank takes `seconds(n)` on its simulated clock, and no wall time.

    Its collectives run when it is started; with `run_in_wait` when its result is waited for, after later local steps.

    Yields:
        The clock, which the caller advances by the time of a step.
    """
    clock = SimulatedClock()

    class SimulatedExchange:
        failed = False

        def __init__(self, exchange, due, device):
            self.due, self.seconds = due, seconds(next(clock.rounds))
            self._end = clock() + self.seconds
            self._exchange = exchange
            self._result = None if run_in_wait else exchange()

        @property
        def done(self):
            return clock() >= self._end

        def wait(self):
            clock.advance(max(0.0, self._end - clock()))
            return self._exchange() if run_in_wait else self._result

    with (
        mock.patch.object(averager_module, "BackgroundExchange", SimulatedExchange),
        mock.patch.object(averager_module, "perf_counter", clock),
    ):
        yield clock
