"""Leaving the interpreter without an abort.

gloo's threads let go of a collective's tensors a moment after it is done, and need the interpreter's lock for that. If
the interpreter is already on its way out then, the thread is ended inside a destructor, and the process aborts after a
training that went well ("terminate called without an active exception", seen with torch 2.15 in about one of ten runs,
with plain DDP too). A launcher takes that for a failure. A short pause before the end gives the threads their turn.
"""

from __future__ import annotations

import atexit
import time
from functools import cache

PAUSE = 0.05
"""Seconds; the interpreter hands its lock on after 0.005."""


@cache
def pause_at_exit() -> None:
    """From now on, pause for a moment when the interpreter ends. Once a process, however often it is called."""
    atexit.register(time.sleep, PAUSE)
