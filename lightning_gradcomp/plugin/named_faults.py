"""Wherever Lightning's DDP strategy talks to the other ranks, a failure names rank, step and phase."""

from __future__ import annotations

import signal
import time
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from lightning_gradcomp.averaging.faults import PATIENCE, ExchangeFailed, explained, leave_word
from lightning_gradcomp.plugin.launch import SubprocessLauncher


class DDPWithNamedFaults(DDPStrategy):
    """DDPStrategy whose errors say what was going on; and a rank that fails by itself leaves word of the reason."""

    def explained(self, doing: str) -> AbstractContextManager[None]:
        """Name what fails inside."""
        module = self.lightning_module
        trainer = module._trainer if module is not None else None  # `module.trainer` raises where there is none
        return explained(trainer.global_step if trainer is not None else 0, doing)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.explained("forward"):  # DDP sends buffers before it
            return super().training_step(*args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self.explained("at a barrier"):
            super().barrier(*args, **kwargs)

    def broadcast(self, *args: Any, **kwargs: Any) -> Any:
        with self.explained("in a broadcast"):
            return super().broadcast(*args, **kwargs)

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        with self.explained("in a reduction"):
            return super().reduce(*args, **kwargs)

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        with self.explained("in a gather"):
            return super().all_gather(*args, **kwargs)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if not isinstance(exception, ExchangeFailed):
            leave_word(f"raised {type(exception).__name__}: {exception}")
        elif isinstance(self._launcher, SubprocessLauncher):
            time.sleep(PATIENCE)  # for the others to say what they have to say
            self._launcher.kill(signal.SIGKILL)  # one that hangs would outlive this process, and keep its GPU
