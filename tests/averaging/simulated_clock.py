"""topology="auto" on a simulated clock: what a step takes is what a test says."""

import threading
from contextlib import contextmanager
from functools import partial
from unittest import mock

from lightning_gradcomp.averaging import autotune, topology
from lightning_gradcomp.averaging.autotune import Autotune, TrialRound
from tests.averaging.workers import backward, prescribed_loss

SHORT = (TrialRound(2, 4, close=1.25), TrialRound(2, 4, close=1.0))
EACH = SHORT[0].steps
"""Steps of each candidate in a round of them."""


class SimulatedClock(threading.local):
    """Seconds since the start of a rank, which is a thread."""

    now = 0.0

    def __call__(self):
        return self.now


@contextmanager
def simulated_clock(rounds=SHORT):
    """Inside, trials have these rounds, by a clock whose `now` each rank sets."""
    clock = SimulatedClock()
    with (
        mock.patch.object(autotune, "ROUNDS", rounds),
        mock.patch.object(topology, "Autotune", partial(Autotune, clock=clock)),
    ):
        yield clock


def timed_steps(parts, rank, clock, steps, seconds, step_of=lambda averager: averager.step()):
    """What each of these steps did, "dense" or a topology, where it takes `seconds(what, sparsity)`."""
    model, optimizer, averager = parts
    seen = []
    for step in steps:
        backward(model, optimizer, rank, step, prescribed_loss)
        decision = averager.begin_step()
        clock.now += seconds(decision.topology, decision.sparsity)
        step_of(averager)
        seen.append(decision.topology)
    return seen
