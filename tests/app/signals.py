"""A callback for a run under test: at one step it sends a signal."""

import os
import signal
import time

from lightning import Callback


class Send(Callback):
    """Sends signal `name` before step `step`.

    Args:
        step: optimizer steps before it.
        name: such as "SIGINT".
        to: "group" (as a Ctrl-C in a terminal) or "parent" (as `timeout` and batch systems), by rank 0, which then
            waits until it receives it; or "rank": to itself, by rank 1.
    """

    def __init__(self, step: int, name: str, to: str) -> None:
        self.step, self.number, self.to = step, getattr(signal, name), to

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step != self.step or trainer.global_rank != (self.to == "rank"):
            return
        if self.to == "group":
            os.killpg(os.getpgrp(), self.number)
        elif self.to == "rank":
            os.kill(os.getpid(), self.number)
        else:
            received, handler = [], signal.getsignal(self.number)
            signal.signal(self.number, lambda *given: (received.append(given), handler(*given)))
            os.kill(os.getppid(), self.number)
            while not received:
                time.sleep(0.001)
